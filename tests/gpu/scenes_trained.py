"""Trainings on the device and on the CPU whose arithmetic is exact: equal means give equal parameters.

The gradient of Σ p·x by p is x itself, and a learning rate that is a power of two makes the update p − lr·g
round once, with a fused multiplication or without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.recipes import recipe
from tests.support.models import digest
from tests.support.recipes import EVERY_RECIPE
from tests.support.where import WHERE

STEPS, BAD = 20, 10
SHAPES = ((37, 61), (61,), (53, 41), (1,), (47, 59), (59,))
CPU = torch.device("cpu")


class Products(nn.Module):
    """The sum of products of its parameters with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES)

    def forward(self, *given: Tensor) -> Tensor:
        """`given` becomes the gradient, bit for bit."""
        return torch.stack([(p * x).sum() for p, x in zip(self.factors, given, strict=True)]).sum()


def given(step: int, where: torch.device) -> list[Tensor]:
    """This rank's gradients of a step; of rank 1 one is NaN in step `BAD`."""
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    drawn = [torch.randn(shape, generator=draw) for shape in SHAPES]
    if step == BAD and dist.get_rank() == 1:
        drawn[0][3, 5] = torch.nan
    return [each.to(where) for each in drawn]


def run(text: str | None, where: torch.device, place: PlacementName = "host") -> dict[str, Any]:
    """Train, without gradwire if there is no recipe; a step whose means are not finite is skipped, as a
    `GradScaler` would.
    """
    ddp = DistributedDataParallel(Products().to(where), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    wire = None if text is None else gradwire.attach(ddp, optimizer, text, placement=place)
    skipped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(*given(step, where)).backward()
        if all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None):
            optimizer.step()
        else:
            skipped += 1
    placement = "" if wire is None else wire.report().placement
    return {"digest": digest(ddp), "skipped": skipped, "placement": placement}


def trained(text: str) -> dict[str, Any]:
    """There and here, and on the device where the host need not read what is sent.

    `comparable` if what it sends does not depend on measured times.
    """
    built = recipe(text).build()
    return {
        "there": run(text, WHERE),
        "here": run(text, CPU),
        "device": run(text, WHERE, "device") if built.exchange.laws.stays_on_device else None,
        "comparable": built.next is None and built.watch is None,
    }


SCENES: dict[str, Callable[[], Any]] = {label: partial(trained, text) for label, text in EVERY_RECIPE.items()}
