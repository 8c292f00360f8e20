"""Signs of bad health, and numbers that are none."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean, pvariance

import pytest

from gradwire.planning.health import EVERY, GROWN, Health, Lag, Losses, LossTrend, pooled
from tests.support.looped import looped


def _lags(*unsent: float) -> list[bool]:
    lag = Lag()
    return [bool(lag.add(1.0, each)) for each in unsent]


def test_a_memory_that_fills_as_noise_does_is_healthy() -> None:
    """The largest ratio whose noise adds up over 1000 steps, looked at every 32."""
    assert not any(_lags(*(math.sqrt(min(EVERY * number, 1000)) for number in range(1, 60))))


def test_a_memory_that_grows_without_bound_is_not() -> None:
    told = _lags(*(2.0**number for number in range(12)))
    assert told.index(True) == 6, "twice more than eight times the middle of the first three looks"


def test_one_look_is_no_sign_and_less_than_a_gradient_is_too_little() -> None:
    assert not any(_lags(2.0, 2.0, 2.0, 100.0, 2.0, 100.0, 2.0))
    assert not any(_lags(0.01, 0.01, 0.01, 0.9, 0.9, 0.9)), "ninety times as much, and little"


@pytest.mark.parametrize(("fresh", "unsent"), [(0.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (math.nan, 1.0)])
def test_what_says_nothing_is_left_out(fresh: float, unsent: float) -> None:
    lag = Lag()
    assert [lag.add(fresh, unsent) for _ in range(9)] == [""] * 9
    assert [lag.add(1.0, 1.0) for _ in range(3)] == [""] * 3
    assert lag.add(1.0, 2 * GROWN) == ""
    assert lag.add(1.0, 2 * GROWN) != ""


@looped(("fresh", "unsent"), [(0.0, 30.0), (math.nan, 30.0), (1.0, math.inf)])
def test_a_look_that_shows_nothing_is_not_between_two_signs(fresh: float, unsent: float) -> None:
    lag = Lag()
    assert [lag.add(1.0, 2.0) for _ in range(3)] == [""] * 3
    assert lag.add(1.0, 30.0) == ""
    assert lag.add(fresh, unsent) == ""
    assert lag.add(1.0, 31.0) != ""


def _trend(mean_of: list[float], spread: float = 0.2, seed: int = 0) -> list[bool]:
    """Blocks of 32 losses around each mean."""
    draw, trend = Random(seed), LossTrend()
    found = []
    for mean in mean_of:
        losses = [draw.gauss(mean, spread) for _ in range(EVERY)]
        found.append(bool(trend.add(Losses(EVERY, fmean(losses), pvariance(losses)))))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_that_falls_or_stays_is_healthy(seed: int) -> None:
    assert not any(_trend([3.0 * 0.95**number for number in range(50)] + [0.2] * 50, seed=seed))


FALLING = [1.5 + 0.5**number for number in range(9)]


def test_a_loss_that_rises_twice_in_a_row_is_not_and_is_told_once() -> None:
    told = _trend([*FALLING, 2.5, 2.6, 2.6, 2.6])
    assert told == [False] * 10 + [True] + [False] * 2
    assert not any(_trend([*FALLING, 2.5, 1.5, 2.5, 1.5])), "only once in a row"


def test_a_loss_that_rises_slowly_is_told_too() -> None:
    """By 5 % of the lowest in each look."""
    told = _trend([*FALLING, *(1.5 + 0.075 * number for number in range(30))])
    assert told.index(True) > len(FALLING)


@looped("last", [0.0, 0.5, 0.9, 0.95])
@looped("seed", range(5))
def test_losses_that_vary_together_for_many_steps_are_healthy(last: float, seed: int) -> None:
    """10,000 steps on one rank; a loss keeps the share `last` of how far the one before was from the mean."""
    draw, trend, here = Random(seed), LossTrend(), 0.0
    for _look in range(300):
        losses = []
        for _step in range(EVERY):
            here = last * here + math.sqrt(1.0 - last**2) * draw.gauss(0.0, 0.3)
            losses.append(2.0 + here)
        assert trend.add(Losses(EVERY, fmean(losses), pvariance(losses))) == ""


def test_losses_of_all_ranks_are_one_sample() -> None:
    draw = Random(1)
    groups = [[draw.random() for _ in range(size)] for size in (5, 1, 9)]
    parts = [Losses(len(group), fmean(group), pvariance(group)) for group in groups]
    whole = [value for group in groups for value in group]
    found = pooled([*parts, Losses(0, 0.0, 0.0)])
    assert found.number == 15
    assert found.mean == pytest.approx(fmean(whole), rel=1e-12)  # a dozen roundings in float64
    assert found.variance == pytest.approx(pvariance(whole), rel=1e-12)


def test_what_was_noted_is_taken_once_without_what_is_not_finite() -> None:
    health = Health()
    for loss in (1.0, math.nan, 3.0, math.inf):
        health.note(loss)
    assert health.drain() == Losses(2, 2.0, 1.0)
    assert health.drain() == Losses(0, 0.0, 0.0)


def test_losses_that_no_look_takes_fill_no_memory_and_absurd_ones_break_nothing() -> None:
    health = Health()
    for step in range(10_000):
        health.note(float(step))
        health.note(1e200)  # its square is no float
    number, mean, _variance = health.drain()
    assert number < 5_000
    assert mean == 9_999 - (number - 1) / 2, "the last ones"
