"""Rates by use per weight, at the edges of the ranges; rates by patterns mean what each name was given."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from gradwire.planning.rates import RateRule, patterns_of


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


def test_a_layer_without_weights_has_the_first_rate() -> None:
    assert RateRule()(0, 0.0) == 400.0


def rates_from(patterns: dict[str, int], names: list[str]) -> list[int]:
    return [next(rate for pattern, rate in patterns.items() if fnmatchcase(name, pattern)) for name in names]


def test_patterns_mean_the_same_rates() -> None:
    rates = {
        "conv.weight": 25,
        "layer1.0.conv1.weight": 25,
        "layer1.0.conv2.weight": 25,
        "layer1.1.conv1.weight": 50,
        "layer1.10.conv1.weight": 400,
        "layer10.0.weight": 50,
        "scale": 400,
        "layer2.scale": 400,
        "layer2.inner.weight": 25,
    }
    patterns = patterns_of(rates)
    assert rates_from(patterns, list(rates)) == list(rates.values())
    assert len(patterns) < len(rates)


def test_nothing_counted_is_no_pattern() -> None:
    assert patterns_of({}) == {}


def test_a_name_that_begins_a_module_again_later_loses_nothing() -> None:
    rates = {"a.x": 25, "b": 50, "a.y": 400}
    assert rates_from(patterns_of(rates), list(rates)) == [25, 50, 400]
