"""Real gloo ranks: frames of many segments, several of which are on their way at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import ProcessGroupComm
from gradwire.exchange.base import run
from gradwire.exchange.gcomp import gcomp
from gradwire.unit.context import ExchangeContext
from tests.support.ring_order import ring_sum
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

NUMEL = 100_003
SEGMENTS = (1000, 1000, 1 << 20, 1000)
"""Elements of a segment, by step: 34 to 51 segments, and one."""


@dataclass(frozen=True)
class Mean:
    """Of one step on one rank."""

    as_plain_ring: bool
    all_sent: bool


def numbers(rank: int, step: int) -> Tensor:
    """Of many magnitudes, with zeros."""
    random = torch.Generator().manual_seed(100 * step + rank)
    scale = 2.0 ** torch.randint(-30, 2, (NUMEL,), generator=random)
    x = torch.randn(NUMEL, generator=random) * scale
    return torch.where(torch.rand(NUMEL, generator=random) < 0.2, 0.0, x)


def means() -> list[Mean]:
    """Several in a row."""
    comm, found = ProcessGroupComm(dist.group.WORLD), []
    for step, segment in enumerate(SEGMENTS):
        x = numbers(comm.rank, step)
        mean = torch.empty_like(x)
        ctx = ExchangeContext(step, 0, comm.rank, comm.world)
        run(replace(gcomp("lossless", tables="static"), segment=segment), x, mean, comm, ctx)
        expected = ring_sum([numbers(rank, step) * (1.0 / comm.world) for rank in range(comm.world)])
        found.append(Mean(as_plain_ring=torch.equal(mean, expected), all_sent=not x.any()))
    return found


@pytest.mark.parametrize("world", rest([2, 3], but=[3]))
def test_a_ring_of_many_segments_has_the_bits_of_a_plain_one(world: int, tmp_path: Path) -> None:
    for found in Ranks(world, tmp_path)(means):
        assert len(found) == len(SEGMENTS)
        assert all(mean.as_plain_ring for mean in found)
        assert all(mean.all_sent for mean in found)
