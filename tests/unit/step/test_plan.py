"""The plan of an exchange works out once what all steps of a phase have in common."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from gradwire.comm import run_ranks
from gradwire.comm.base import Comm
from gradwire.exchange.compose import Always, EveryK, Schedule, Scheme, WarmUp, remember
from gradwire.exchange.dense import dense
from gradwire.step.gradient_bucket import DirectShare
from gradwire.step.plan import ExchangePlan
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import ParameterSpec, Slot

STEPS, NUMEL = 8, 64


@pytest.mark.parametrize("schedule", [Always(), WarmUp(3), EveryK(3, order="paper")], ids=str)
def test_a_plan_knows_which_exchange_a_scheme_of_schemes_runs(schedule: Schedule) -> None:
    scheme = Scheme(remember(dense()), schedule=schedule)
    common = ExchangeContext(step=0, unit=1, rank=0, world=2)
    plan = ExchangePlan("a unit", scheme, NUMEL, torch.float32, common, checked=False)

    def steps(comm: Comm) -> list[list[float]]:
        found = []
        for step in range(STEPS):
            ctx = ExchangeContext(step, 1, comm.rank, comm.world)
            x, mean = torch.full((NUMEL,), 1.0 + comm.rank), torch.zeros(NUMEL)
            agreed = plan.collectives(ctx)
            if agreed.rounds:
                assert not isinstance(cast(Any, agreed.start).__self__, Scheme)
                agreed.start(x, mean, comm, ctx)()
            found.append([float(mean[0]), float(x[0])])
        return found

    travels = [scheme.now(ExchangeContext(step, 1, 0, 2)) is not None for step in range(STEPS)]
    assert any(travels)
    for rank, found in enumerate(run_ranks(2, steps)):
        assert found == [[1.5, 0.0] if each else [0.0, 1.0 + rank] for each in travels]


def test_an_exchange_beside_the_flat_buffers_has_another_plan_only_in_another_place_of_the_step() -> None:
    share = DirectShare(dense(), (Slot(ParameterSpec("w", (NUMEL,), torch.float32, NUMEL), 0),))
    common, region = ExchangeContext(step=0, unit=0, rank=1, world=2, flat_buffer=-1), torch.zeros(NUMEL)
    first = share.plan(region, 0, common, checked=True)
    assert share.plan(region, 0, common, checked=True) is first
    moved = share.plan(region, 3, common, checked=True)  # DDP has made other buckets
    assert (moved.ctx.unit, moved.ctx.rank, moved.ctx.flat_buffer) == (3, 1, -1)
    wide = share.plan(region.double(), 3, common, checked=True)
    assert wide.collectives(wide.ctx).rounds[0].dtype is torch.float64
