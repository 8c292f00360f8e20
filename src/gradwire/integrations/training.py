"""Attaching for frameworks that own the training loop, on one process as on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from gradwire._api.attach import attach
from gradwire._api.wire import Wire
from gradwire.sources.unwrap import inside, listed, optimizers_of


def attached(
    before: Wire | None, world: int, model: nn.Module, optimizer: Any, *arguments: Any, **options: Any
) -> Wire:
    """The wire `before`, if it is this model's; or a new one by `attach(model, optimizer, ...)`.

    A framework that trains on one process neither wraps the model nor makes a process group. If it trains a
    model once more, it may do so with another optimizer, which `before` then follows. On several processes
    most frameworks wrap the model anew.
    """
    optimizer = listed(optimizer)
    if before is not None and before.attached.model is inside(model):
        if before.attached.optimizers != optimizers_of(optimizer):
            before.switch_optimizer(optimizer)
        return before
    with _some_group(world):
        return attach(model, optimizer, *arguments, **options)


@contextmanager
def _some_group(world: int) -> Iterator[None]:
    """Context with a process group of this process alone, if there is none and none is needed.

    The group does not stay: a framework that starts several processes later would take it for theirs. The
    wire of a single rank sends nothing, so it does not need the group again.
    """
    if world > 1 or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
