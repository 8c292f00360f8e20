"""Scenes of one rank's misfortune that the status vote carries to all."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.codec.select.topk import TopK
from gradwire.comm.base import SHORT_BYTES
from gradwire.comm.checksums import SealedLayout
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, train
from tests.support.states import own_state
from tests.support.world import lose_groups

RECIPE = "topk(ratio=0.05)"
DAMAGED = {"topk": "topk(ratio=0.2)", "dense": "dense", "gcomp": "gcomp", "int8": "int8"}
UNLUCKY = 1


class Accident(Exception):
    """What a codec may raise."""


def _backward(ddp: DistributedDataParallel, step: int, factor: float = 1.0) -> dict[str, Any]:
    """One forward and backward pass: what it raised, and when."""
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(ddp(inputs), targets) * factor
    started_s = time.monotonic()
    try:
        loss.backward()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        after_s = time.monotonic() - started_s
        return {"error": type(error).__name__, "text": str(error), "notes": notes, "after_s": after_s}
    return {"error": None}


def _memory(wire: gradwire.Wire) -> list[Any]:
    return [memory.clone() for memory in own_state(wire)["memory"].values()]


def _equal(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def accident(kind: type[BaseException] = Accident, **options: Any) -> dict[str, Any]:
    """An exception in a codec of one rank, and the steps before and after it."""
    ddp = DistributedDataParallel(perceptron(), **options)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, RECIPE)
    train(ddp, optimizer, range(5))
    before, step, replica = _memory(wire), wire.report().step, digest(ddp)
    honest = TopK.select

    def broken(*_: Any) -> Any:
        raise kind("out of luck")

    if dist.get_rank() == UNLUCKY:
        TopK.select = broken  # type: ignore[method-assign]
    optimizer.zero_grad()
    seen = _backward(ddp, 5)
    TopK.select = honest  # type: ignore[method-assign]
    intact = _equal(_memory(wire), before) and wire.report().step == step and digest(ddp) == replica
    losses = train(ddp, optimizer, range(5, 60))
    return {**seen, "intact": intact, "losses": [losses[0], losses[-1]], "digest": digest(ddp)}


def not_finite(recipe: str) -> dict[str, Any]:
    """A NaN in one rank's loss: the step counts on no rank, and training goes on as if it had not been."""
    digests, seen = [], {}
    for poisoned in (False, True):
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
        optimizer = optimizer_of(ddp)
        wire = gradwire.attach(ddp, optimizer, recipe)
        train(ddp, optimizer, range(5))
        if poisoned:
            before = _memory(wire)
            optimizer.zero_grad()
            factor = torch.nan if dist.get_rank() == UNLUCKY else 1.0
            seen = _backward(ddp, 99, factor)
            seen["any_finite"] = any(bool(g.isfinite().any()) for g in gradients(ddp))
            seen["intact"] = _equal(_memory(wire), before)
            seen["skipped"] = wire.report().skipped_steps
        train(ddp, optimizer, range(5, 20))
        digests.append(digest(ddp))
    return {**seen, "as_without": digests[0] == digests[1], "digest": digests[1]}


def broken_off() -> dict[str, Any]:
    """A backward pass that the user's own code interrupts on all ranks."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, RECIPE)
    train(ddp, optimizer, range(3))

    def trip(_gradient: Any) -> None:
        raise Accident("in a hook of the user's")

    first = next(ddp.parameters()).register_hook(trip)
    seen = _backward(ddp, 3)
    first.remove()
    try:
        again = _backward(ddp, 4)
    except RuntimeError as error:
        again = {"error": type(error).__name__, "text": str(error)}
    lose_groups()
    return {"first": seen["error"], "then": again["error"]}


def damaged(recipe: str, **options: Any) -> dict[str, Any]:
    """A flipped bit in each long message that one rank receives in a step, and the steps around it."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, recipe, checksums=True, **options)
    losses = train(ddp, optimizer, range(5))
    before, step, replica = _memory(wire), wire.report().step, digest(ddp)
    honest = SealedLayout.open

    def struck(how: SealedLayout, message: Tensor, *arguments: Any) -> tuple[bool, bool]:
        message[0] ^= how.payload_bytes > SHORT_BYTES
        return honest(how, message, *arguments)

    if dist.get_rank() == UNLUCKY:
        SealedLayout.open = struck  # type: ignore[method-assign]
    optimizer.zero_grad()
    seen = _backward(ddp, 5)
    SealedLayout.open = honest  # type: ignore[method-assign]
    intact = _equal(_memory(wire), before) and wire.report().step == step and digest(ddp) == replica
    losses += train(ddp, optimizer, range(5, 60))
    added = wire.report().checksum_bytes
    return {
        **seen,
        "intact": intact,
        "losses": [losses[0], losses[-1]],
        "digest": digest(ddp),
        "added": added,
    }


def one_sided() -> list[str]:
    """Checksums that only one rank asks for."""
    ddp = DistributedDataParallel(perceptron())
    try:
        gradwire.attach(ddp, None, RECIPE, checksums=dist.get_rank() == UNLUCKY)
    except gradwire.RanksDisagree as error:
        return [str(error)]
    return []


SCENES: dict[str, Callable[[], Any]] = {
    "accident": accident,
    "accident, static graph": partial(accident, static_graph=True),
    "accident, unused": partial(accident, find_unused_parameters=True),
    "accident, exit": partial(accident, SystemExit),
    "nan, topk": partial(not_finite, "topk(ratio=0.05)"),
    "nan, covap": partial(not_finite, "covap(interval=4)"),
    "one-sided": one_sided,
    **{f"damaged, {name}": partial(damaged, text) for name, text in DAMAGED.items()},
    "broken off": broken_off,
}
