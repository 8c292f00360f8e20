"""Real gloo ranks under FSDP2: one is killed, or cannot go on, while the others gather or scatter."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.comm import Pending
from gradwire.comm.base import Finishing
from gradwire.sources.fsdp import held
from gradwire.sources.fsdp.routes import ByNodes, Straight
from tests.process.fsdp_models import BF16, NODES, Layered, loss_of, reshard, sharded, train, whole
from tests.support.bits import Checksums, checksums
from tests.support.raised import Raised, raised
from tests.support.ranks import returned, started, wait_for
from tests.support.tiers import cases

pytestmark = pytest.mark.process

TIMEOUT_S = 60.0
VICTIM = 1


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ValueError("planted")


def _pass(model: nn.Module) -> Raised:
    return raised(lambda: loss_of(model, 2).backward())


def in_a_pass(where: str) -> Raised:
    """After two steps one rank is killed, in front of a gather or a scatter."""
    model: Any = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradwire.attach(model, optimizer, "int4", gather="int8")
    train(model, optimizer, range(2))
    if dist.get_rank() == VICTIM and where == "gather":
        model.blocks[0][0].register_forward_pre_hook(die)  # the next block is gathered by the others
    elif dist.get_rank() == VICTIM:
        model.blocks[0][0].register_full_backward_hook(die)  # this block is scattered by the others
    return _pass(model)


def after_the_heads(befalls: Callable[[], None]) -> Raised:
    """A rank is gone, or raises, after all have told what will come, and before it does."""
    model = sharded(mp_policy=BF16)
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
        return _pass(model)


BEFALLS = [(in_a_pass, "gather"), (after_the_heads, die), (in_a_pass, "scatter"), (after_the_heads, refuse)]


@pytest.mark.parametrize(("scene", "what"), cases(BEFALLS, but=BEFALLS[:2]))
def test_survivors_raise_long_before_the_timeout(
    tmp_path: Path, scene: Callable[[Any], Raised], what: Any
) -> None:
    with started(partial(scene, what), 3, tmp_path, TIMEOUT_S) as ranks:
        wait_for([ranks[0], ranks[2]], guard_s=100.0)
    for rank in (0, 2):
        heard: Raised = returned(tmp_path, rank)
        assert heard.kind == "TransportError", heard
        assert "a collective failed" in heard.text
        assert heard.after_s < TIMEOUT_S / 2


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


@dataclass(frozen=True)
class Untaken:
    """What a pass has raised, and the parameters three steps later, beside those of stock FSDP2."""

    raised: Raised
    masters: Checksums
    masters_of_stock: Checksums


def untaken(way: str, nodes: list[list[int]] | None) -> Untaken:
    """A rank cannot take what a gather brings. All go on from there as stock FSDP2 does."""

    def trained(ours: bool) -> tuple[Raised, Checksums]:
        make = partial(Layered, blocks=4 if way == "two told" else 2)
        model: Any = sharded(make, mp_policy=BF16, reshard_after_forward=way != "two")
        if way == "two":  # both are under way before the first one comes
            model.set_modules_to_forward_prefetch(list(model.blocks))
        elif way == "two told":  # the head that tells of the second is under way when all hear of the first
            for number, each in enumerate((model, *model.blocks)):
                each.set_modules_to_forward_prefetch(list(model.blocks)[number : number + 2])
        optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.05), Raised()
        if ours:
            gradwire.attach(model, optimizer, "dense", gather="exact", nodes=nodes)
        train(model, optimizer, range(3))
        if ours:
            is_here = dist.get_rank() == VICTIM
            with untaking(way, Straight if nodes is None else ByNodes) if is_here else nullcontext():
                heard = _pass(model)
        train(model, optimizer, range(3, 6))
        return heard, checksums([whole(model)])

    return Untaken(*trained(True), trained(False)[1])


UNTAKEN = [
    *((way, None, 2) for way in ("last", "two", "two told", "damage", "no room")),
    ("damage", "in a row", 4),
]


@pytest.mark.parametrize(("way", "nodes", "world"), cases(UNTAKEN, but=UNTAKEN[:1]))
def test_all_ranks_raise_where_one_cannot_take_what_an_exact_gather_brings(
    tmp_path: Path, way: str, nodes: str | None, world: int
) -> None:
    # "last": it is heard of in the backward pass, which FSDP2 never ends by itself then.
    with started(partial(untaken, way, nodes and NODES[nodes]), world, tmp_path, TIMEOUT_S) as ranks:
        wait_for(ranks, guard_s=100.0)
    found: list[Untaken] = [returned(tmp_path, rank) for rank in range(world)]
    for rank, each in enumerate(found):
        if rank == VICTIM:
            assert each.raised.kind == ("WireError" if way == "damage" else "MemoryError"), each
        else:
            assert each.raised.kind == "PeerFailed", each
            assert f"rank {VICTIM} could not take the gathered parameters of module" in each.raised.text
        assert each.raised.after_s < TIMEOUT_S / 2
        assert each.masters == each.masters_of_stock == found[0].masters
