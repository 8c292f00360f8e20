"""Steps' worth of gradient that waits, from what all ranks say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from gradwire.planning.lateness import LEAST, RISEN, Lateness, Layers, Weighed, is_weighed

MANY = 4 * LEAST


def _told(rows: list[list[Weighed]], cycle: int = 1) -> Lateness:
    lateness = Lateness(cycle)
    for each in rows:
        lateness.add(each)
    return lateness


def _alone(*unsent: float, fresh: float = 1.0) -> Lateness:
    return _told([[Weighed(fresh, each)] for each in unsent])


def test_ranks_are_pooled_by_squares() -> None:
    """A rank that waits with much is not outvoted by those with little, and equal ranks say what one says."""
    rows = [Weighed(1.0, 3.0), Weighed(1.0, 1.0)]
    assert _told([rows] * MANY).late == pytest.approx(math.sqrt(10 / 2))
    assert _told([[Weighed(2.0, 0.5)] * 8] * MANY).late == pytest.approx(0.25)


def test_nothing_is_told_too_early() -> None:
    for number in range(LEAST):
        few = _alone(*[1.0] * number)
        assert few.late is None
        assert not few.is_known
    assert _alone(*[1.0] * LEAST).late == pytest.approx(1.0)
    assert not _alone(*[1.0] * (2 * LEAST - 1)).is_known
    assert _alone(*[1.0] * 2 * LEAST).is_known


@pytest.mark.parametrize("cycle", range(1, 8))
def test_whole_cycles_are_enough_whatever_their_length(cycle: int) -> None:
    rows = [[Weighed(1.0, 0.2)]] * 4 * max(LEAST, cycle)
    first = next(number for number in range(len(rows)) if _told(rows[:number], cycle).late is not None)
    known = next(number for number in range(len(rows)) if _told(rows[:number], cycle).is_known)
    assert LEAST <= first < LEAST + cycle
    assert first % cycle == 0
    assert known == 2 * first


def test_first_gradients_spikes_and_a_warm_up_do_not_decide() -> None:
    ordinary = [[Weighed(1.0, 0.2)]] * 2 * LEAST
    for odd in ([Weighed(100.0, 0.2)], [Weighed(0.01, 0.2)], [Weighed(1.0, 20.0)]):
        assert _told([odd] * (LEAST - 1) + ordinary).late == pytest.approx(0.2)
        assert _told(ordinary + [odd] * (LEAST - 1)).late == pytest.approx(0.2)


def test_gradients_that_grow_and_shrink_leave_a_constant_share_as_it_is() -> None:
    """Beside the median gradient, what waits at the height of a rise would seem five times as late."""
    norms = [1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 6.0, 4.0, 3.0]
    lateness = Lateness()
    for number, (before, fresh) in enumerate(pairwise(norms), 1):
        lateness.add([Weighed(fresh, 0.2 * before)])
        if number >= LEAST:
            assert lateness.late == pytest.approx(0.2, rel=0.35)


def test_it_follows_what_changes_to_stay() -> None:
    assert _told([[Weighed(1.0, 0.2)]] * MANY + [[Weighed(0.1, 0.2)]] * 2 * LEAST).late == pytest.approx(2.0)


@pytest.mark.parametrize("phase", range(6))
def test_units_that_rest_count_over_whole_cycles(phase: int) -> None:
    """Everything rests together for six steps, so that one look sees anything from nothing to all."""
    waits = [math.sqrt((step + phase) % 6) for step in range(40)]
    told = _told([[Weighed(1.0, each)] for each in waits], cycle=6)
    assert told.late == pytest.approx(math.sqrt(sum(range(6)) / 6))
    assert told.is_known


def test_what_still_rises_is_not_known() -> None:
    filling = [0.1 * 1.2**step for step in range(2 * LEAST)]
    assert not _alone(*filling).is_known
    assert _alone(*filling, *[filling[-1]] * 2 * LEAST).is_known
    assert _alone(*reversed(filling)).is_known, "what falls is within any limit that it was within"
    step = 0.99 * RISEN
    assert _alone(*[1.0] * LEAST, *[step] * LEAST).is_known


@pytest.mark.parametrize("odd", [Weighed(0.0, 1.0), Weighed(math.nan, 1.0), Weighed(1.0, math.inf)])
def test_steps_that_say_nothing_are_left_out(odd: Weighed) -> None:
    good = [Weighed(1.0, 0.5)] * 2
    told = _told([good] * LEAST + [[odd, odd]] * MANY)
    assert told.late == pytest.approx(0.5)
    assert not told.is_known
    if odd.fresh:
        assert _told([[good[0], odd]] * MANY).late is None, "one rank is enough"


def test_the_latest_layer_is_that_of_all_ranks() -> None:
    told = _told([[Weighed(1.0, 1.0, 2.0, 7.0), Weighed(1.0, 1.0, 3.0, 4.0)]] * LEAST)
    assert (told.latest, told.layer) == (3.0, 4)


def test_a_layer_is_late_by_its_own_usual_gradient() -> None:
    layers = Layers()
    for fresh in (50.0, *[1.0] * LEAST):
        row = layers.weighed([10.0, fresh], [10.0, 2.0])
    assert (row.latest, row.layer) == (2.0, 1)
    assert row.unsent == pytest.approx(math.hypot(10.0, 2.0)), "of the whole, it is little"


def test_a_layer_that_says_nothing_is_not_the_latest() -> None:
    layers = Layers()
    for _step in range(LEAST):
        row = layers.weighed([0.0, 1.0, math.nan, 1.0], [5.0, 0.5, 1.0, math.inf])
    assert (row.latest, row.layer) == (0.5, 1)
    assert Layers().weighed([1.0], [1.0])[2:] == (0.0, 0), "after one look"
    assert Layers().weighed([], []).fresh == 0.0


def test_looks_see_every_phase_of_a_cycle() -> None:
    for every, cycle in ((32, 4), (32, 3), (8, 8), (4, 6)):
        phases = {step % cycle for step in range(4 * every) if is_weighed(step, every, cycle)}
        assert phases == set(range(cycle))
    assert sum(is_weighed(step, 32) for step in range(320)) == 10


@pytest.mark.parametrize("cycle", [0, -1])
def test_a_cycle_has_steps(cycle: int) -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        Lateness(cycle)
