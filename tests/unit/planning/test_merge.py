"""The dynamic program against every other grouping; the search is exact for two groups, and stops in time."""

from __future__ import annotations

from math import log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.planning.boundaries import Boundaries, even_groups, layer_wise
from gradwire.planning.costs import BackwardTiming, CodecCost, Line
from gradwire.planning.merge import GroupCost, bisected, optimal_boundaries, search_boundaries
from gradwire.planning.step_time import Sent, UnitWork
from tests.support.planning_problems import (
    all_groupings,
    backward,
    cost,
    groups_of,
    step_held_up_s,
    step_seconds,
)

ROUNDING = 1 + 1e-12
"""Sums of fewer than 100 terms in another order: some 100 roundings of 1e-16."""


@pytest.mark.parametrize("seed", range(8))
def test_no_grouping_is_better(seed: int) -> None:
    draw = Random(seed)
    for _ in range(40):
        of = backward(draw, draw.randint(1, 9))
        at = cost(draw, of)
        best = min(step_seconds(of, boundaries, at) for boundaries in all_groupings(len(of.numel)))
        assert step_seconds(of, optimal_boundaries(of, at), at) <= best * ROUNDING


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_no_grouping_into_as_few_groups_is_better(most: int) -> None:
    draw = Random(most)
    for _ in range(40):
        of = backward(draw, draw.randint(1, 9))
        at = cost(draw, of)
        found = optimal_boundaries(of, at, most)
        best = min(step_seconds(of, boundaries, at) for boundaries in all_groupings(len(of.numel), most))
        assert len(found) < most
        assert step_seconds(of, found, at) <= best * ROUNDING


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_grouping_of_many_tensors_that_anybody_thinks_of_is_better(data: st.DataObject) -> None:
    draw = Random(data.draw(st.integers(0, 2**32)))
    tensors = data.draw(st.integers(2, 60))
    of = backward(draw, tensors)
    at = cost(draw, of)
    other = tuple(sorted(data.draw(st.sets(st.integers(1, tensors - 1)))))
    found = step_seconds(of, optimal_boundaries(of, at), at)
    for boundaries in (other, (), layer_wise(tensors), even_groups(tensors, 2), even_groups(tensors, 5)):
        assert found <= step_seconds(of, boundaries, at) * ROUNDING


@pytest.mark.parametrize("seed", range(5))
def test_the_seconds_are_those_of_a_step_whose_backward_pass_encodes(seed: int) -> None:
    draw = Random(seed)
    of = backward(draw, 12)
    at = cost(draw, of)
    for boundaries in ((), (6,), (2, 3, 9), layer_wise(12)):
        units = [
            UnitWork(of.ready_s[stop - 1], numel, (Sent(at.communicate(numel)),))
            for first, stop in groups_of(boundaries, 12)
            for numel in [sum(of.numel[first:stop])]
        ]
        step_s = step_held_up_s(units, of.total_s, CodecCost(at.compress, Line(0.0, 0.0)))
        assert step_s == pytest.approx(step_seconds(of, boundaries, at), rel=1e-12)


def test_by_hand() -> None:
    # Ready at 1 and 2; encoding takes 1 a group and holds up the second tensor; the wire takes 3 a tensor.
    of = BackwardTiming(0.0, (1.0, 2.0), (1, 1), 2.0)
    at = GroupCost(Line(1.0, 0.0), Line(0.0, 3.0), Line(0.0, 0.5))
    # Decoding takes half a second an element, and holds up as encoding does.
    assert step_seconds(of, (), at) == 2 + 1 + 1 + 6
    assert step_seconds(of, (1,), at) == max(1 + 1.5 + 3, 2 + 2 * 1.5) + 3
    assert optimal_boundaries(of, at) == (1,)


def test_a_dear_call_merges_everything_and_a_free_one_nothing() -> None:
    of = BackwardTiming(0.0, (1.0, 2.0, 3.0), (5, 5, 5), 3.0)
    assert optimal_boundaries(of, GroupCost(Line(10.0, 0.0), Line(0.0, 0.1))) == ()
    assert optimal_boundaries(of, GroupCost(Line(0.0, 0.0), Line(0.0, 0.3))) == (1, 2)


@pytest.mark.parametrize("tensors", [0, 1])
def test_nothing_to_cut(tensors: int) -> None:
    of = BackwardTiming(0.0, (1.0,) * tensors, (5,) * tensors, 1.0)
    assert optimal_boundaries(of, GroupCost(Line(1.0, 0.0), Line(1.0, 0.0))) == ()


def test_costs_that_fall_and_times_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValueError, match="falls"):
        GroupCost(Line(-0.1, 1.0), Line(0.0, 1.0))
    with pytest.raises(ValueError, match="ascend"):
        optimal_boundaries(
            BackwardTiming(0.0, (2.0, 1.0), (1, 1), 2.0), GroupCost(Line(0.0, 0.0), Line(0.0, 1.0))
        )


@pytest.mark.parametrize("seed", range(8))
def test_two_groups_are_the_best_two(seed: int) -> None:
    draw = Random(seed)
    for _ in range(40):
        of = backward(draw, draw.randint(2, 40))
        at = cost(draw, of)
        found = bisected(lambda boundaries, of=of, at=at: step_seconds(of, boundaries, at), len(of.numel))
        best = min(step_seconds(of, (boundary,), at) for boundary in range(1, len(of.numel)))
        assert step_seconds(of, found, at) <= best * (1 + 1e-12)


@pytest.mark.parametrize("most", [3, 4])
def test_more_groups_are_the_best_of_their_first_boundaries(most: int) -> None:
    draw = Random(most)
    for _ in range(20):
        of = backward(draw, draw.randint(most, 9))
        at = cost(draw, of)
        found = search_boundaries(
            lambda boundaries, of=of, at=at: step_seconds(of, boundaries, at), len(of.numel), most
        )
        every = [
            (step_seconds(of, boundaries, at), len(boundaries))
            for boundaries in all_groupings(len(of.numel), most)
        ]
        # It stops at the first number of groups that gains nothing, and is best among as many as it chose.
        assert step_seconds(of, found, at) <= min(
            s for s, boundaries in every if boundaries == len(found)
        ) * (1 + 1e-12)


def test_a_search_at_two_groups_tries_fewer_than_fifty_of_314() -> None:
    draw = Random(1)
    of = backward(draw, 314)
    at, tried = cost(draw, of), []

    def timed(boundaries: Boundaries) -> float:
        tried.append(boundaries)
        return step_seconds(of, boundaries, at)

    search_boundaries(timed, 314)
    assert len(tried) == len(set(tried)), "an iteration was timed twice"
    assert len(tried) <= 2 * (log2(314) + 1) + 2 < 50


def of_groups(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds, start=1))


def test_when_it_gets_worse_the_one_before_is_returned() -> None:
    seconds = of_groups(10.0, 8.0, 9.0, 1.0)
    assert len(search_boundaries(lambda boundaries: seconds[len(boundaries) + 1], 10, most=4)) + 1 == 2


def test_when_it_gains_too_little_the_new_one_is_returned() -> None:
    seconds = of_groups(10.0, 9.9, 5.0)
    assert (
        len(search_boundaries(lambda boundaries: seconds[len(boundaries) + 1], 10, most=3, alpha=0.02)) + 1
        == 2
    )
    assert (
        len(search_boundaries(lambda boundaries: seconds[len(boundaries) + 1], 10, most=3, alpha=0.001)) + 1
        == 3
    )


def test_too_little_is_a_share_of_the_time_with_one_group_less() -> None:
    seconds = of_groups(10.0, 5.0, 4.0)  # 5 gained are less than 0.6 of 10, and more than 0.6 of 5
    assert (
        len(search_boundaries(lambda boundaries: seconds[len(boundaries) + 1], 10, most=3, alpha=0.6)) + 1
        == 2
    )


@pytest.mark.parametrize("tensors", [0, 1, 2, 3])
def test_few_tensors(tensors: int) -> None:
    found = search_boundaries(lambda boundaries: -len(boundaries), tensors, most=5)
    assert len(found) == max(0, tensors - 1)


@pytest.mark.parametrize(("most", "alpha"), [(0, 0.0), (2, -0.1)])
def test_senseless_options_are_refused(most: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="at least"):
        search_boundaries(lambda _boundaries: 0.0, 5, most, alpha)
