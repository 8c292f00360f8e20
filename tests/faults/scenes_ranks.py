"""Scenes that end when a rank is killed or stopped from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.states import own_state


def until_it_breaks(recipe: str, nodes: Any = None) -> dict[str, Any]:
    """Train and say so, until `backward()` raises; then look at what is left."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, recipe, nodes=nodes)
    for step in range(1_000_000):
        state, good_s = own_state(wire), time.monotonic()
        error = _step(ddp, optimizer, step)
        if error is not None:
            break
        print(step, flush=True)  # whoever watches knows that training is under way
    raised_s = time.monotonic()
    left = own_state(wire)
    again_s = time.monotonic()
    again = _step(ddp, optimizer, step)
    return {
        "error": type(error).__name__,
        "text": str(error),
        "after_s": again_s - good_s,
        "raised_s": raised_s,
        "intact": left["step"] == state["step"] and _equal(left["memory"], state["memory"]),
        "again": type(again).__name__,
        "again_after_s": time.monotonic() - again_s,
    }


def _step(ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Exception | None:
    inputs, targets = batch(step)
    optimizer.zero_grad()
    try:
        nn.functional.mse_loss(ddp(inputs), targets).backward()
    except Exception as error:
        return error
    optimizer.step()
    return None


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left | right)


SCENES: dict[str, Callable[[], Any]] = {
    "topk": partial(until_it_breaks, "topk(ratio=0.05)"),
    "dense": partial(until_it_breaks, "dense"),
    "nodes": partial(until_it_breaks, "topk(ratio=0.05)", ((0, 1), (2, 3))),
}
