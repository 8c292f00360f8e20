"""The slowest of many ranks."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from gradwire.planning.stragglers import slowest


def test_the_same_seed_draws_the_same_and_more_workers_are_never_faster() -> None:
    draws = [slowest(0.2, workers, 50, seed=3) for workers in (1, 2, 8, 64, 4096)]
    assert draws[2] == slowest(0.2, 8, 50, seed=3) != slowest(0.2, 8, 50, seed=4)
    for few, more in pairwise(draws):
        assert all(one <= other for one, other in zip(few, more, strict=True))


def test_a_rank_alone_takes_its_mean_time() -> None:
    # 20000 draws of a variance of e^0.04 - 1 = 0.041: their mean is off by 4 · sqrt(0.041 / 20000) at most.
    assert fmean(slowest(0.2, 1, 20000)) == pytest.approx(1.0, abs=0.006)


def test_without_spread_no_rank_is_late() -> None:
    assert slowest(0.0, 1000, 3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("spread", "workers", "steps"), [(-0.1, 2, 2), (0.1, 0, 2), (0.1, 2, 0)])
def test_refused(spread: float, workers: int, steps: int) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        slowest(spread, workers, steps)
