"""Scenes of FSDP2's own traffic, in which something befalls a rank in the middle of a collective."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
from gradwire.comm import Pending
from gradwire.comm.base import Finishing
from gradwire.sources.fsdp import held
from gradwire.sources.fsdp.routes import ByNodes, Straight
from tests.process.fsdp_models import Layered, alike, loss_of, reshard, sharded, train, whole

VICTIM = 1


def killed(where: str) -> dict[str, Any]:
    """After two steps one rank is killed, in front of a gather or a scatter; what the others raise."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradwire.attach(model, optimizer, "int4", gather="int8")
    train(model, optimizer, range(2))
    linear: nn.Module = model.blocks[0][0]  # type: ignore[index,union-attr,assignment]

    if dist.get_rank() == VICTIM and where == "gather":
        linear.register_forward_pre_hook(lambda *_: die())  # the next block is gathered by the others
    elif dist.get_rank() == VICTIM:
        linear.register_full_backward_hook(lambda *_: die())  # this block is scattered by the others
    return told(model)


def told(model: nn.Module) -> dict[str, Any]:
    """What a pass of this rank raises."""
    start_s = time.monotonic()
    error: Exception | None = None
    try:
        loss_of(model, 2).backward()
    except Exception as raised:
        error = raised
    return {"error": type(error).__name__, "text": str(error), "after_s": time.monotonic() - start_s}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ValueError("planted")


def between(befalls: Callable[[], None]) -> dict[str, Any]:
    """A rank is gone, or raises, after all have told what will come, and before it does."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradwire.attach(model, optimizer, "dense", gather="exact", nodes=None)
    train(model, optimizer, range(2))
    reshard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.pi)  # it goes as it is, after the heads
    exchange, calls = Straight.exchange, list[int]()

    def befallen(self: Straight, rows: Tensor, row: Tensor) -> Pending:
        calls.append(row.numel())
        if len(calls) == 2 and dist.get_rank() == VICTIM:
            befalls()
        return exchange(self, rows, row)

    with patch.object(Straight, "exchange", befallen):
        return told(model)


@contextmanager
def untaking(way: str, kind: type[Straight | ByNodes]) -> Iterator[None]:
    """Within it, a rank gets damaged bytes, or has no room to decode them: those of any module, or of some
    by their numbers.
    """
    exchange: Any = kind.exchange

    def damaged(self: Any, rows: Tensor, row: Tensor) -> Pending:
        def flip() -> None:
            rows[0, held.HEAD_BYTES + 90] ^= 1

        pending: Pending = exchange(self, rows, row)
        return Finishing(pending, flip) if row.numel() > held.HEAD_BYTES + 90 else pending

    decode_steps = held.decode_steps
    numbers = {"no room": {0, 1, 2}, "last": {2}, "two": {1, 2}, "two told": {1, 2}}

    def without_room(code: Tensor, values: Tensor, key: Any) -> None:
        if key.module in numbers[way]:
            raise MemoryError("planted")
        decode_steps(code, values, key)

    planted: Any = (kind, "exchange", damaged) if way == "damage" else (held, "decode_steps", without_room)
    with patch.object(*planted):
        yield


def untaken(way: str, nodes: list[list[int]] | None) -> dict[str, Any]:
    """A rank cannot take what a gather brings. All raise, and go on from there as stock FSDP2 does."""
    found: dict[str, Any] = {}
    masters = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for ours in (True, False):
        make = partial(Layered, blocks=4 if way == "two told" else 2)
        model: Any = sharded(make, mp_policy=policy, reshard_after_forward=way != "two")
        if way == "two":  # both are under way before the first one comes
            model.set_modules_to_forward_prefetch(list(model.blocks))
        elif way == "two told":  # the head that tells of the second is under way when all hear of the first
            for number, each in enumerate((model, *model.blocks)):
                each.set_modules_to_forward_prefetch(list(model.blocks)[number : number + 2])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if ours:
            gradwire.attach(model, optimizer, "dense", gather="exact", nodes=nodes)
        train(model, optimizer, range(3))
        if ours:
            is_here = dist.get_rank() == VICTIM
            with untaking(way, Straight if nodes is None else ByNodes) if is_here else nullcontext():
                found = told(model)
        train(model, optimizer, range(3, 6))
        masters.append(whole(model))
    return {**found, "same": torch.equal(*masters), "alike": alike(masters[0])}


SCENES: dict[str, Callable[[], Any]] = {
    **{where: partial(killed, where) for where in ("gather", "scatter")},
    "killed after the heads": partial(between, die),
    "raises after the heads": partial(between, refuse),
    "damage": partial(untaken, "damage", None),
    **{way: partial(untaken, way, None) for way in ("no room", "last", "two", "two told")},
    "damage, by nodes": partial(untaken, "damage", [[0, 1], [2, 3]]),
}
