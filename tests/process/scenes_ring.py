"""A scene of the compressed ring in many segments, of which several are on their way at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import ProcessGroupComm
from gradwire.exchange.base import run
from gradwire.exchange.gcomp import gcomp
from gradwire.unit.context import ExchangeContext
from tests.support.ring_order import ring_sum

NUMEL = 100_003


def numbers(rank: int, step: int) -> Tensor:
    """Of many magnitudes, with zeros."""
    random = torch.Generator().manual_seed(100 * step + rank)
    scale = 2.0 ** torch.randint(-30, 2, (NUMEL,), generator=random)
    x = torch.randn(NUMEL, generator=random) * scale
    return torch.where(torch.rand(NUMEL, generator=random) < 0.2, 0.0, x)


def means() -> list[bool]:
    """Whether several means in a row, in 34 to 51 segments and in one, have the bits of a plain ring."""
    comm, right = ProcessGroupComm(dist.group.WORLD), []
    for step, segment in enumerate((1000, 1000, 1 << 20, 1000)):
        x = numbers(comm.rank, step)
        mean = torch.empty_like(x)
        ctx = ExchangeContext(step, 0, comm.rank, comm.world)
        run(replace(gcomp("lossless", tables="static"), segment=segment), x, mean, comm, ctx)
        expected = ring_sum([numbers(rank, step) * (1.0 / comm.world) for rank in range(comm.world)])
        right.append(torch.equal(mean, expected) and not x.any())
    return right


SCENES: dict[str, Callable[[], Any]] = {"means": means}
