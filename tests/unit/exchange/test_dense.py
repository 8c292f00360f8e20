"""Plain all-reduce: the arithmetic of DDP, in its order."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import ThreadComm, run_ranks
from gradwire.exchange import dense, run
from gradwire.moment import Moment
from tests.unit.exchange.steps import step


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_divides_before_it_sums(world: int) -> None:
    inputs = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    expected = inputs[0] * (1.0 / world)
    for x in inputs[1:]:
        expected = expected + x * (1.0 / world)
    for result in step(dense(), inputs.__getitem__, world):
        assert torch.equal(result.mean, expected)
        assert not result.unsent.any()


def test_half_precision_does_not_overflow_on_the_way() -> None:
    for result in step(dense(), lambda rank: torch.full((3,), 60000.0, dtype=torch.float16), 4):
        assert result.mean.tolist() == [60000.0] * 3


def test_result_is_there_only_when_finished() -> None:
    def body(comm: ThreadComm) -> bool:
        x, mean = torch.ones(2), torch.empty(2)
        finish = dense().start(x, mean, comm, Moment(0, 0, comm.rank, comm.world))
        return callable(finish)

    assert run_ranks(2, body) == [True, True]


def test_in_place() -> None:
    def body(comm: ThreadComm) -> list[float]:
        x = torch.full((2,), float(comm.rank))
        run(dense(), x, x, comm, Moment(0, 0, comm.rank, comm.world))
        return x.tolist()

    assert run_ranks(3, body) == [[1.0, 1.0]] * 3
