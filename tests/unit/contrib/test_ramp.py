"""A ratio that falls while training warms up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.comm import ThreadComm, run_ranks
from gradwire.contrib.dgc import MomentumCorrection, ramp
from gradwire.exchange.base import run
from gradwire.exchange.payloads import gather
from gradwire.memory import Residual
from gradwire.unit.context import ExchangeContext
from tests.support.compensation import Compensation

AT = ExchangeContext(step=0, unit=0, rank=0, world=1)


def test_the_stages_are_those_of_the_paper() -> None:
    choice = ramp(top_k, 0.001, steps=40)
    counts = [choice.count(100_000, replace(AT, step=step)) for step in (0, 9, 10, 20, 30, 39, 40, 10**9)]
    assert counts == [25_000, 25_000, 6_250, 1_562, 400, 400, 100, 100]


def test_stages_below_the_final_ratio_are_left_out() -> None:
    assert ramp(top_k, 0.3, steps=40) == ramp(top_k, 0.3, steps=0)
    assert [each.ratio for each in ramp(top_k, 0.05, steps=40).selectors] == [0.25, 0.0625, 0.05]


def test_steps_may_be_fewer_than_stages() -> None:
    choice = ramp(top_k, 0.001, steps=2)
    assert choice.count(1000, replace(AT, step=2)) == 1
    assert choice.count(1000, AT) >= choice.count(1000, replace(AT, step=1))


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="steps=-1 must not be negative"):
        ramp(top_k, 0.1, steps=-1)


@pytest.mark.parametrize("memory", [Residual(), MomentumCorrection(momentum=0.0)])
def test_a_ratio_that_changes_loses_no_residual(memory: Residual | MomentumCorrection) -> None:
    exchange, size, steps = gather(sparse(ramp(top_k, 0.01, 8))), 400, 12

    def body(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor]:
        planes, mean, arrived = Compensation(memory, size), torch.empty(size), torch.zeros(size)
        for step in range(steps):
            x = planes.compensate(torch.arange(1.0, size + 1) * (comm.rank + 1), step, 2)
            run(exchange, x, mean, comm, ExchangeContext(step, 0, comm.rank, 2))
            planes.commit()
            arrived += mean
        return arrived, planes.unsent

    (arrived, one), (_, other) = run_ranks(2, body)
    # Integers below 2^24 and halves of them: nothing is rounded, so nothing may be missing.
    assert torch.equal(arrived + (one + other) / 2, torch.arange(1.0, size + 1) * 1.5 * steps)
