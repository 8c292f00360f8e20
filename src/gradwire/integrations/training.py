"""Attaching for frameworks that own the training loop, on one process as on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from gradwire._api.attach import attach
from gradwire._api.checks import check_optimizers
from gradwire._api.unwrap import Optimizers, inside, optimizers_of
from gradwire._api.wire import Wire


def attached(
    before: Wire | None, world: int, model: nn.Module, optimizer: Any, *arguments: Any, **options: Any
) -> Wire:
    """The wire of `before`, if it is this model's, or a new one of `attach(model, optimizer, ...)`.

    A framework that trains on one process neither wraps the model nor makes a process group. Where it trains
    a model once more, it may do so with another optimizer, which `before` then follows. On several processes
    it wraps the model anew.
    """
    if before is not None and before.attached.model is inside(model):
        now = optimizers_of(optimizer)
        if before.attached.optimizers == now:
            return before
        if world == 1:
            _follow(before, now)
            return before
    with _some_group(world):
        return attach(model, optimizer, *arguments, **options)


def _follow(wire: Wire, optimizers: Optimizers) -> None:
    """Let others than before step the parameters. Raises what `attach` raises where they do not suit."""
    attached, engine = wire.attached, wire.attached.backward.engine
    check_optimizers(optimizers, attached.source.module)
    attached.source.suits(engine.layout, optimizers)
    engine.env = replace(engine.env, check=partial(attached.source.suits, optimizers=optimizers))
    attached.backward.steps.change(optimizers, attached.model)
    wire.attached = replace(attached, optimizers=optimizers)


@contextmanager
def _some_group(world: int) -> Iterator[None]:
    """A process group of this process alone where there is none and need be none.

    It does not stay: a framework that starts several processes later would take it for theirs. A wire of a
    single rank sends nothing, and so does not need it again.
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
