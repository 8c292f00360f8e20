"""Algorithm 2 on steps that are timed as they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from statistics import fmean

import pytest

from gradwire.planning.boundaries import Boundaries
from gradwire.planning.facts import StepObservation
from gradwire.planning.merge import search_boundaries
from gradwire.planning.timed_merge import (
    APART,
    MOST_STEPS,
    GroupingTrial,
    TimedMerge,
    contest,
    groupings,
    timed_search,
)
from tests.support.looped import looped
from tests.support.planning_problems import all_groupings, backward, cost, step_seconds

TENSORS = 60


def seconds(boundaries: Boundaries) -> float:
    """Falls up to a boundary at 41, then rises; one group is slow."""
    return 1.0 if not boundaries else 0.5 + abs(boundaries[0] - 41) / TENSORS + 0.3 * (len(boundaries) > 1)


def _run(
    merge: TimedMerge, took_s: Callable[[Boundaries, int], float], steps: int = 100
) -> tuple[GroupingTrial, int]:
    """Train; the first step of a grouping has no predecessor under it. Returns the last trial, and when."""
    now, age = Boundaries(), 0
    for step in range(steps):
        previous_s = took_s(now, age - 1) if age else 0.0
        trial = merge.observe(StepObservation(step, previous_s, compressed_s=0.0))
        age += 1
        if trial is not None:
            now, age = trial.boundaries, 0
            if trial.is_last:
                return trial, step
    raise AssertionError("the search did not end")


def test_it_finds_what_the_search_would_find_and_ends_within_its_steps() -> None:
    trial, step = _run(timed_search(TENSORS), lambda boundaries, _age: seconds(boundaries))
    assert trial.boundaries == search_boundaries(seconds, TENSORS) == (41,)
    assert step < MOST_STEPS


@looped("most_steps", [49, MOST_STEPS])
@looped("tensors", [2, 3, 4, 5, 17, 18, 60, 105, 161, 257, 258, 314, 1000])
def test_wherever_the_best_boundary_lies_it_keeps_to_its_steps(tensors: int, most_steps: int) -> None:
    for best in range(1, tensors, max(1, tensors // 60)):
        merge = timed_search(tensors, most_steps=most_steps)
        trial, step = _run(
            merge, lambda boundaries, _age, at=best: 0.1 + abs(boundaries[0] - at) if boundaries else 1e9
        )
        assert abs(trial.boundaries[0] - best) < merge.stride
        assert step < most_steps


def test_steps_that_vary_by_a_hundredth_do_not_lead_it_astray() -> None:
    draw, found, at_random = Random(54), [], []
    for _ in range(40):
        of = backward(draw, 54)
        at = cost(draw, of)
        of_boundaries = {
            boundaries: step_seconds(of, boundaries, at) for boundaries in all_groupings(54, most=2)
        }
        trial, _ = _run(
            timed_search(54),
            lambda boundaries, _age, of_boundaries=of_boundaries: (
                of_boundaries[boundaries] * draw.gauss(1, 0.01)
            ),
        )
        found.append(of_boundaries[trial.boundaries] / min(of_boundaries.values()) - 1)
        at_random.append(fmean(of_boundaries.values()) / min(of_boundaries.values()) - 1)
    # 0.5 % of 9 % remain; 1.0 % where the boundaries that are compared are neighbours.
    assert fmean(found) < 0.09 * fmean(at_random)


def test_the_fastest_of_all_that_were_timed_stays_wherever_the_search_ends() -> None:
    timed: dict[Boundaries, float] = {}

    def took_s(boundaries: Boundaries, _age: int) -> float:
        # Two valleys: the search passes by the deeper one, beside which it compares a boundary still deeper.
        timed[boundaries] = {(): 9.0, (26,): 0.5, (33,): 0.4}.get(
            boundaries, 1.0 + abs(sum(boundaries) - 50) / 60
        )
        return timed[boundaries]

    trial, _ = _run(timed_search(TENSORS), took_s)
    assert len(timed) > 3
    assert trial.boundaries == min(timed, key=timed.__getitem__)
    search = search_boundaries(lambda boundaries: took_s(boundaries, 0), TENSORS, apart=APART)
    assert search != trial.boundaries, "the search ends elsewhere"


@looped("groups", [3, 4])
@looped("tensors", [1, 5, 40, 161])
@looped("most_steps", [6, 49, 1000])
def test_a_search_for_more_groups_keeps_to_its_steps_too(groups: int, tensors: int, most_steps: int) -> None:
    merge = timed_search(tensors, groups, most_steps=most_steps)
    # The more groups the better, so that no number of them is left out; what is best among them is drawn.
    draw = Random(tensors)
    took_s = cache(lambda boundaries: draw.random() - 2 * len(boundaries))
    trial, step = _run(merge, lambda boundaries, _age: 10.0 + took_s(boundaries), steps=most_steps + 1)
    assert step < merge.most_steps <= most_steps
    assert all(boundary % merge.stride == 0 for boundary in trial.boundaries)
    finer = -(-tensors // max(merge.stride - 1, 1))
    assert merge.stride == 1 or 3 * groupings(finer, groups) > most_steps, "no more stay together than must"


def test_of_forty_tensors_three_groups_are_found_in_many_steps_or_of_neighbours_in_fewer() -> None:
    assert [timed_search(40, 3, most_steps=most).stride for most in (1500, 200, 49)] == [1, 4, 8]


def test_a_gain_below_alpha_ends_the_search() -> None:
    ends = [
        _run(timed_search(5, 3, alpha, 200), lambda boundaries, _age: 10.0 - len(boundaries))[0]
        for alpha in (0.2, 0.0)
    ]
    assert [len(trial.boundaries) + 1 for trial in ends] == [2, 3]


def test_too_few_steps_to_compare_anything_are_refused() -> None:
    with pytest.raises(ValueError, match="5 steps are too few"):
        timed_search(3, most_steps=5)


@pytest.mark.parametrize("tensors", [2, 3, 4, 5, 6, 17, 60, 105, 161, 257])
def test_no_search_looks_at_more_groupings_than_it_has_time_for(tensors: int) -> None:
    most = 0
    for best in range(1, tensors):
        looked: set[Boundaries] = set()

        def seconds_of(boundaries: Boundaries, at: int = best, seen: set[Boundaries] = looked) -> float:
            seen.add(tuple(boundaries))
            return abs(boundaries[0] - at) if boundaries else 1e9

        search_boundaries(seconds_of, tensors, apart=APART)
        most = max(most, len(looked))
    assert most <= groupings(tensors)


def test_few_tensors_get_more_steps_each() -> None:
    ends = [
        _run(timed_search(tensors, most_steps=60), lambda boundaries, _age: seconds(boundaries))[1]
        for tensors in (161, 60)
    ]
    assert [(end + 1) % per for end, per in zip(ends, (3, 4), strict=True)] == [0, 0]


@pytest.mark.parametrize("tensors", [TENSORS, 161])
def test_the_first_step_of_a_grouping_does_not_count(tensors: int) -> None:
    # Of 161 tensors a single step counts, and no median would leave out a cold one beside it.
    trial, _ = _run(
        timed_search(tensors, most_steps=60),
        lambda boundaries, age: 100.0 - seconds(boundaries) if age == 0 else seconds(boundaries),
    )
    assert trial.boundaries == (41,)


def test_one_disturbed_step_in_three_does_not_count() -> None:
    merge = timed_search(TENSORS)
    trial, _ = _run(merge, lambda boundaries, age: 9.0 if age == 2 else seconds(boundaries), steps=200)
    assert trial.boundaries == (41,)


@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_few_tensors(tensors: int) -> None:
    trial, _ = _run(timed_search(tensors), lambda boundaries, _age: seconds(boundaries))
    assert trial.boundaries == search_boundaries(seconds, tensors)


@pytest.mark.parametrize(("planned_s", "chosen"), [(0.9, (3,)), (1.0, ()), (1.1, ())])
def test_what_was_planned_stays_only_if_it_is_faster_than_one_group(
    planned_s: float, chosen: Boundaries
) -> None:
    trial, step = _run(contest(((), (3,))), lambda boundaries, _age: planned_s if boundaries else 1.0)
    assert trial.boundaries == chosen
    assert step < 14, "a step behind another, a cold one and five that count, twice"
