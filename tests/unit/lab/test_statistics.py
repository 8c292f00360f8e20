"""Medians over steps and ranks, paired ratios, turned orders."""

import pytest

from gradwire_lab.bench.statistics import StepSample, median_over_steps, mixed, paired, slowest, spread


def sample(step_s, hook_s=None):
    return StepSample(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, hook_s)


def test_the_slowest_rank_decides_a_step():
    assert slowest([[sample(1.0), sample(5.0)], [sample(2.0), sample(3.0)]]) == [2.0, 5.0]


def test_ranks_with_different_numbers_of_steps_are_an_error():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        slowest([[sample(1.0)], []])


def test_median_over_steps_of_mean_over_ranks():
    ranks = [[sample(1.0), sample(2.0), sample(9.0)], [sample(3.0), sample(4.0), sample(9.0)]]
    assert median_over_steps(ranks, lambda step: step.step_s) == 3.0


def test_what_nobody_measured_has_no_median():
    assert median_over_steps([[sample(1.0)]], lambda step: step.hook_s) is None
    assert median_over_steps([], lambda step: step.step_s) is None


def test_pairing_cancels_a_drift_that_both_share():
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    result = paired([3 * value for value in drift], drift)
    assert (result.ratio, result.low, result.high) == (3.0, 3.0, 3.0)


def test_the_interval_holds_the_median_and_repeats():
    top = [1.0, 1.2, 0.9, 1.1, 1.05, 0.95, 1.0]
    first, second = paired(top, [1.0] * 7), paired(top, [1.0] * 7)
    assert first == second
    assert first.low <= first.ratio <= first.high
    assert first.low < first.high


def test_no_rounds_no_ratio():
    with pytest.raises(ValueError, match="no rounds"):
        paired([], [])


def test_everyone_comes_first_once():
    assert [mixed("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert mixed([], 3) == []


def test_spread_is_relative():
    assert spread([1.0]) == 0.0
    assert spread([9.0, 11.0]) == pytest.approx(0.1)
