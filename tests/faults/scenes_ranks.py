"""Scenes that end when a rank is killed, stopped or out of memory, for every source of gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.sources.nodes.level import Packing
from tests.process import sharded_models
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.states import own_state

NODES = ((0, 1), (2, 3))
LIVES_ON_S = 12.0
Made = tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]


def ddp(recipe: str, **options: Any) -> Made:
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, **options)


def plain(recipe: str, **options: Any) -> Made:
    model = perceptron()
    optimizer, replicas = optimizer_of(model), dist.group.WORLD
    return model, optimizer, gradwire.attach(model, optimizer, recipe, replicas=replicas, **options)


def hsdp(recipe: str, **options: Any) -> Made:
    model = sharded_models.sharded()
    return model, *sharded_models.attached(model, recipe, **options)


def until_it_breaks(
    made: Callable[[str], Made], recipe: str = "topk(ratio=0.05)", tries_again: bool = True
) -> dict[str, Any]:
    """Train and say so, until `backward()` raises; then look at what is left.

    Under FSDP no rank tries again: its own collectives, inside a node, would wait for the timeout.
    """
    model, optimizer, wire = made(recipe)
    for step in range(1_000_000):
        state, good_s = own_state(wire), time.monotonic()
        error = _step(model, optimizer, step)
        if error is not None:
            break
        print(step, flush=True)  # the test waits until training is under way
    raised_s = time.monotonic()
    left = own_state(wire)
    again_s = time.monotonic()
    again = _step(model, optimizer, step) if tries_again else error
    return {
        "error": type(error).__name__,
        "text": str(error),
        "after_s": again_s - good_s,
        "raised_s": raised_s,
        "intact": left["step"] == state["step"] and _equal(left["memory"], state["memory"]),
        "again": type(again).__name__,
        "again_after_s": time.monotonic() - again_s,
    }


def without_any_memory() -> dict[str, Any]:
    """After two steps rank 1 has no room for what its node sends, whenever it asks: it cannot even pay."""
    model, optimizer, wire = ddp("topk(ratio=0.05)", nodes=NODES)
    errors = [_step(model, optimizer, step) for step in range(2)]
    rows, state, good_s = Packing.rows, own_state(wire), time.monotonic()

    def none(packing: Packing, like: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("no room")
        return rows(packing, like)

    with mock.patch.object(Packing, "rows", none):
        errors += [_step(model, optimizer, step) for step in (2, 3)]
    after_s, left = time.monotonic() - good_s, own_state(wire)
    if dist.get_rank() == 1:
        time.sleep(LIVES_ON_S)  # or a closed connection would tell the others
    return {
        "errors": [type(error).__name__ for error in errors],
        "cause": type(None if errors[2] is None else errors[2].__cause__).__name__,
        "after_s": after_s,
        "intact": left["step"] == 2 and _equal(left["memory"], state["memory"]),
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Exception | None:
    inputs, targets = batch(step)
    optimizer.zero_grad()
    try:
        nn.functional.mse_loss(model(inputs), targets).backward()
    except Exception as error:
        return error
    optimizer.step()
    return None


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left | right)


SCENES: dict[str, Callable[[], Any]] = {
    "topk": partial(until_it_breaks, ddp),
    "dense": partial(until_it_breaks, ddp, "dense"),
    "nodes": partial(until_it_breaks, partial(ddp, nodes=NODES)),
    "plain": partial(until_it_breaks, plain),
    "hsdp": partial(until_it_breaks, hsdp, tries_again=False),
    "without memory": without_any_memory,
}
