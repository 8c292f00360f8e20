"""Predictions stay what they were: on twelve clusters, and by facts that real runs have measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.golden import predicted
from tests.support.tiers import rest

WITHIN = 0.01
"""The share by which a predicted number may move."""
SOON = {"two ranks, 1 Gbit/s", "nodes of eight", "rounds"}
"""Clusters of `make test`."""

CLUSTERS = rest(predicted.CLUSTERS, SOON)


def frozen(kind: str, name: str) -> Any:
    return json.loads((predicted.HERE / f"{kind}.json").read_text(encoding="utf-8"))[name]


def differences(now: Any, then: Any, at: str = "") -> list[str]:
    """Where two documents differ: texts and keys at all, numbers by more than `WITHIN`.

    What communication exposes is a difference of two times, so it counts as a share of the step.
    """
    if isinstance(then, Mapping):
        if list(now) != list(then) and sorted(now) != sorted(then):
            return [f"{at}: {sorted({*now} ^ {*then})}"]
        if "exposed_s" in then:
            now, then = ({**each, "exposed_s": each["step_s"] + each["exposed_s"]} for each in (now, then))
        return [told for key in then for told in differences(now[key], then[key], f"{at}/{key}")]
    if isinstance(then, float):
        return [] if now == pytest.approx(then, rel=WITHIN) else [f"{at}: {now}, was {then}"]
    return [] if now == then else [f"{at}: {now}, was {then}"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_plan(name: str) -> None:
    assert differences(predicted.planned(name), frozen("plan", name)) == []


@pytest.mark.parametrize("name", CLUSTERS)
def test_simulate(name: str) -> None:
    assert differences(predicted.simulated(name), frozen("simulate", name)) == []


@pytest.mark.parametrize("name", list(predicted.measured()))
def test_auto(name: str) -> None:
    assert differences(predicted.forecast(name), frozen("auto", name)) == []


def test_a_number_that_moves_by_more_is_named() -> None:
    then = {"row": {"step_s": 1.0, "exposed_s": 0.01}, "auto": "int8"}
    near = {"row": {"step_s": 1.005, "exposed_s": 0.012}, "auto": "int8"}
    far = {"row": {"step_s": 1.02, "exposed_s": 0.01}, "auto": "int4"}
    assert differences(near, then) == []
    assert [each.split(":")[0] for each in differences(far, then)] == [
        "/row/step_s",
        "/row/exposed_s",
        "/auto",
    ]
