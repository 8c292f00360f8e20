"""Rates by patterns over names mean what was written down name by name."""

from __future__ import annotations

from fnmatch import fnmatchcase

from gradwire.planning.patterns import patterns_of


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
