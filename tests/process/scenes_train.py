"""Scenes of plain training: dense is DDP, recipes learn, replicas stay equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.planning.profiler import DISCARDED, ORDINARY
from tests.support.models import digest, optimizer_of, perceptron, train
from tests.support.recipes import TRAINS


def dense_is_ddp(**options: Any) -> dict[str, str]:
    """Fingerprints after ten steps without and with gradwire."""
    found = {}
    for kind in ("ddp", "gradwire"):
        ddp = DistributedDataParallel(perceptron(), **options)
        optimizer = optimizer_of(ddp)
        if kind == "gradwire":
            gradwire.attach(ddp, optimizer, "dense")
        train(ddp, optimizer, range(10))
        found[kind] = digest(ddp)
    return found


def learns(recipe: str) -> dict[str, Any]:
    """A hundred steps."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, recipe)
    losses = train(ddp, optimizer, range(100))
    report = wire.report()
    return {
        "first": sum(losses[:10]) / 10,
        "last": sum(losses[-10:]) / 10,
        "digest": digest(ddp),
        "step": report.step,
        "recipe": report.recipe,
        "settled": wire.settled,
        "predicted": report.wire_bytes_per_step,
        "metered": report.metered_bytes_per_step,
        "ratio": report.ratio,
        "led": report.times_led,
        "text": str(report),
        "facts": report.facts,
        "link": report.as_dict()["link"],
        "link_changes": report.as_dict()["link_changes"],
        "parameters": [p.numel() for p in ddp.parameters()],
    }


STEPS = DISCARDED + ORDINARY
"""After which `auto` knows whether communication hides."""


def hides() -> dict[str, Any]:
    """All ranks compute for long, the first one longest, and little is asked of dense."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "auto", target=0.2)

    def computed_for_long(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.05 if dist.get_rank() == 0 else 0.02)
        return nn.functional.mse_loss(output, target)

    settled = []
    for step in range(STEPS + 3):
        train(ddp, optimizer, range(step, step + 1), computed_for_long)
        settled.append(wire.settled)
    report = wire.report()
    alike = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    train(alike, optimizer_of(alike), range(STEPS + 3))
    return {
        "settled": settled,
        "recipe": report.recipe,
        "why": report.why,
        "facts": report.facts,
        "digest": digest(ddp),
        "ddp": digest(alike),
    }


DENSE = ("plain", "bucket views", "small buckets")

SCENES: dict[str, Callable[[], Any]] = {
    "plain": dense_is_ddp,
    "bucket views": partial(dense_is_ddp, gradient_as_bucket_view=True),
    "small buckets": partial(dense_is_ddp, bucket_cap_mb=0.01),
    "hides": hides,
    **{recipe: partial(learns, recipe) for recipe in TRAINS},
}
