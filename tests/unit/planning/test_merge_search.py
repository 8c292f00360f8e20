"""MergeComp's search: exact for two groups, and it stops when the paper says."""

from __future__ import annotations

from math import log2
from random import Random

import pytest

from gradwire.planning.groups import Cuts
from gradwire.planning.merge import step_seconds
from gradwire.planning.merge_search import bisected, search_cuts
from tests.unit.planning.instances import all_groupings, backward, cost


@pytest.mark.parametrize("seed", range(8))
def test_two_groups_are_the_best_two(seed: int) -> None:
    draw = Random(seed)
    for _ in range(40):
        of = backward(draw, draw.randint(2, 40))
        at = cost(draw, of, decode=False)
        found = bisected(lambda cuts, of=of, at=at: step_seconds(of, cuts, at), len(of.numel))
        best = min(step_seconds(of, (cut,), at) for cut in range(1, len(of.numel)))
        assert step_seconds(of, found, at) <= best * (1 + 1e-12)


@pytest.mark.parametrize("most", [3, 4])
def test_more_groups_are_the_best_of_their_first_cuts(most: int) -> None:
    draw = Random(most)
    for _ in range(20):
        of = backward(draw, draw.randint(most, 9))
        at = cost(draw, of, decode=False)
        found = search_cuts(lambda cuts, of=of, at=at: step_seconds(of, cuts, at), len(of.numel), most)
        every = [(step_seconds(of, cuts, at), len(cuts)) for cuts in all_groupings(len(of.numel), most)]
        # It stops at the first number of groups that gains nothing, and is best among as many as it chose.
        assert step_seconds(of, found, at) <= min(s for s, cuts in every if cuts == len(found)) * (1 + 1e-12)


def test_a_search_at_two_groups_tries_fewer_than_fifty_of_314() -> None:
    draw = Random(1)
    of = backward(draw, 314)
    at, tried = cost(draw, of), []

    def timed(cuts: Cuts) -> float:
        tried.append(cuts)
        return step_seconds(of, cuts, at)

    search_cuts(timed, 314)
    assert len(tried) == len(set(tried)), "an iteration was timed twice"
    assert len(tried) <= 2 * (log2(314) + 1) + 2 < 50


def of_groups(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds, start=1))


def test_when_it_gets_worse_the_one_before_is_returned() -> None:
    seconds = of_groups(10.0, 8.0, 9.0, 1.0)
    assert len(search_cuts(lambda cuts: seconds[len(cuts) + 1], 10, most=4)) + 1 == 2


def test_when_it_gains_too_little_the_new_one_is_returned() -> None:
    seconds = of_groups(10.0, 9.9, 5.0)
    assert len(search_cuts(lambda cuts: seconds[len(cuts) + 1], 10, most=3, alpha=0.02)) + 1 == 2
    assert len(search_cuts(lambda cuts: seconds[len(cuts) + 1], 10, most=3, alpha=0.001)) + 1 == 3


@pytest.mark.parametrize("tensors", [0, 1, 2, 3])
def test_few_tensors(tensors: int) -> None:
    found = search_cuts(lambda cuts: -len(cuts), tensors, most=5)
    assert len(found) == max(0, tensors - 1)


@pytest.mark.parametrize(("most", "alpha"), [(0, 0.0), (2, -0.1)])
def test_senseless_options_are_refused(most: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="at least"):
        search_cuts(lambda _cuts: 0.0, 5, most, alpha)
