"""What adaptive recipes make of facts."""

from __future__ import annotations

import pytest

from gradwire.planning.facts import Facts
from gradwire.recipes import Composition, recipe


def _decided(text: str, ccr: float, world: int = 4) -> Composition:
    decision = recipe(text).build().next
    assert decision is not None
    return decision.decide(Facts(backward_s=0.1, allreduce_s=0.1 * ccr, world=world))


@pytest.mark.parametrize("ccr", [1e3, 1e5, 1e8])
def test_an_absurd_ratio_still_gives_something_that_runs(ccr: float) -> None:
    composition = _decided("covap", ccr)
    assert len(composition.cutter((100_000,))) < 100_000
    assert isinstance(recipe(composition.text).build(), Composition)


@pytest.mark.parametrize(
    ("ccr", "interval"), [(0.3, 1), (1.04, 1), (1.06, 2), (3.06, 4), (4.01, 4), (5.2, 6)]
)
def test_covap_takes_the_ceiling_of_the_ratio(ccr: float, interval: int) -> None:
    assert _decided("covap", ccr).text == f"covap(interval={interval})"


def test_covap_says_when_gradients_get_stale() -> None:
    found = _decided("covap", 5.5)
    assert "stale" in found.why
    assert found.warning.startswith("gradients get stale: CCR 5.50 needs every unit only once in 6 steps")


@pytest.mark.parametrize("ccr", [4.0, 5.0])
def test_covap_says_nothing_up_to_five(ccr: float) -> None:
    assert "stale" not in _decided("covap", ccr).why
    assert not _decided("covap", ccr).warning


def test_who_asks_for_a_long_interval_is_not_told() -> None:
    assert not recipe("covap(interval=9)").build().warning


def test_a_decision_gives_its_reason_in_numbers() -> None:
    assert "CCR 4.00" in _decided("covap", 4.0).why
