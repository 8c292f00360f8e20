"""Levels that move, and values that only vary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest

from gradwire.planning.change_detection import SOONEST, WINDOW, ChangeDetector, StepWatch

SEEDS = range(20)


def varying(seed: int, share: float, disturbed: float = 0.05) -> Callable[[], float]:
    """Factors that vary by the share; some are several times as large, as on busy cores."""
    draw = Random(seed)
    return lambda: (
        draw.lognormvariate(0.0, share) * (draw.uniform(2, 6) if draw.random() < disturbed else 1.0)
    )


def moves(level: ChangeDetector, values: Iterable[float]) -> list[int]:
    return [number for number, value in enumerate(values) if level.add(value)]


@pytest.mark.parametrize(("share", "disturbed"), [(0.02, 0.1), (0.1, 0.1), (0.2, 0.1), (0.4, 0.05)])
def test_what_only_varies_has_not_moved(share: float, disturbed: float) -> None:
    """In 20 runs of 200 steps at most one is wrong: what is called certain is so for a run."""
    wrong = 0
    for seed in SEEDS:
        noise = varying(seed, share, disturbed)
        wrong += bool(moves(ChangeDetector(), (0.3 * noise() for _ in range(200))))
    assert wrong <= 1


@pytest.mark.parametrize("factor", [2.0, 0.5, 5.0])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.15])
def test_good_bad_good_are_two_changes_each_within_twelve_steps(factor: float, share: float) -> None:
    """Six values must show it. One that is disturbed costs three more, and more than two are rare."""
    for seed in SEEDS:
        noise, level = varying(seed, share, 0.02), ChangeDetector()
        values = [1.0] * 60 + [factor] * 60 + [1.0] * 60
        found = moves(level, (value * noise() for value in values))
        assert len(found) == 2
        assert found[0] - 60 < 12
        assert found[1] - 120 < 12


def test_a_change_is_told_with_both_levels_and_how_many_values_show_it() -> None:
    level = ChangeDetector()
    assert moves(level, [2.0] * 30 + [6.0] * SOONEST) == [30 + SOONEST - 1]
    assert (level.before, level.now, level.since) == (pytest.approx(2.0), pytest.approx(6.0), SOONEST)


def test_a_few_disturbed_values_in_a_row_are_no_change() -> None:
    values = [1.0] * 30 + ([50.0] * (SOONEST - 1) + [1.0] * 4) * 10
    assert moves(ChangeDetector(), values) == []
    assert moves(ChangeDetector(), [1.0] * 30 + [50.0] * SOONEST) == [30 + SOONEST - 1]


def test_less_than_the_threshold_is_no_change_however_long_it_lasts() -> None:
    assert moves(ChangeDetector(0.2), [1.0] * 30 + [1.19] * 500) == []
    assert moves(ChangeDetector(0.1), [1.0] * 30 + [1.19] * 500) != []


def test_nothing_is_said_before_the_level_is_known_and_after_a_change_it_is_told_anew() -> None:
    assert moves(ChangeDetector(), [1.0, 5.0] * (WINDOW // 2)) == []
    back_at_once = [1.0] * 30 + [5.0] * SOONEST + [1.0] * 40
    assert moves(ChangeDetector(), back_at_once) == [30 + SOONEST - 1], (
        "most of the new level is the old one again"
    )


def test_a_slow_drift_is_found_once_it_is_more_than_the_threshold() -> None:
    [first, *_] = moves(ChangeDetector(), (1.0 + 0.005 * number for number in range(200)))
    assert 1.2 < 1.0 + 0.005 * first < 1.5


def test_a_change_of_steps_that_a_change_of_the_link_explains_is_not_told_later() -> None:
    watch = StepWatch()
    for value in [1.0] * 30:
        assert watch.change_s(value, link_has_changed=False) is None
    assert watch.change_s(2.0, link_has_changed=True) is None
    for value in [2.0] * 60:
        assert watch.change_s(value, link_has_changed=False) is None
    told = [watch.change_s(value, link_has_changed=False) for value in [4.0] * 60]
    assert [each for each in told if each] == [(pytest.approx(2.0), pytest.approx(4.0))]


@pytest.mark.parametrize("threshold", [0.0, -0.1])
def test_a_threshold_must_be_positive(threshold: float) -> None:
    with pytest.raises(ValueError, match=rf"threshold={threshold} must be above 0"):
        ChangeDetector(threshold)
