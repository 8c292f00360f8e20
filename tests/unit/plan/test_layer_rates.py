"""ScaleCom's rates per layer, and how they are written down."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from gradwire.plan.layer_rates import patterns_of, rate_for


@pytest.mark.parametrize(
    ("multiply_adds", "rate"),
    [(3136, 25), (197, 25), (196, 50), (129, 50), (128, 400), (49, 400), (1, 400), (0, 400)],
)
def test_ranges_end_where_the_paper_says(multiply_adds: float, rate: int) -> None:
    assert rate_for(multiply_adds) == rate


@pytest.mark.parametrize("batch", [8, 32, 256])
def test_thresholds_scale_with_the_batch(batch: int) -> None:
    assert rate_for(196 * 32 / batch, batch) == 50
    assert rate_for(197 * 32 / batch, batch) == 25
    assert rate_for(128 * 32 / batch, batch) == 400


def test_other_ranges_may_be_given() -> None:
    assert [rate_for(m, rates=((10.0, 2), (0.0, 8)), reference_batch=64) for m in (100, 20)] == [2, 8]


@pytest.mark.parametrize("bad", [{"batch": 0}, {"batch": 32, "reference_batch": -1}])
def test_a_batch_that_is_none_raises(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        rate_for(1, **bad)


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
