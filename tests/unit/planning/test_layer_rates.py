"""Rates by use per weight, at the edges of the ranges."""

from __future__ import annotations

import pytest

from gradwire.planning import RateRule, overall_rate


@pytest.mark.parametrize(
    ("uses", "rate"), [(0, 400), (1, 400), (128, 400), (128.01, 50), (196, 50), (196.01, 25), (10_000, 25)]
)
def test_ranges_include_their_upper_end(uses: float, rate: float) -> None:
    assert RateRule()(100, 100 * uses) == rate


def test_a_larger_batch_uses_a_weight_more_often() -> None:
    rule = RateRule()
    assert rule(1, 64, batch=32) == 400
    assert rule(1, 64, batch=65) == 50
    assert rule(1, 64, batch=99) == 25
    assert rule(1, 200, batch=16) == 400


def test_thresholds_and_rates_are_options() -> None:
    rule = RateRule((10.0,), (100.0, 2.0), batch=1)
    assert [rule(1, macs) for macs in (10, 11)] == [100.0, 2.0]
    assert rule(1, 6, batch=2) == 2.0


@pytest.mark.parametrize("options", [((1.0, 2.0), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0, 3.0))])
def test_rules_that_make_no_sense_are_refused(options: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        RateRule(*options)


def test_the_whole_is_what_travels_together() -> None:
    # A hundredth of one and a fourth of the other: not the mean of the rates.
    rule = RateRule((10.0,), (100.0, 4.0))
    assert overall_rate([(1000, 0.0), (1000, 1e9)], rule) == pytest.approx(2000 / (10 + 250))
    assert overall_rate([], rule) == 1.0
    assert RateRule()(0, 0.0) == 400.0
