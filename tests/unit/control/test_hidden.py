"""Whether communication hides in ordinary dense steps, so that nothing else has to be measured or tried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gradwire.comm import Comm, run_ranks
from gradwire.planning.profiler import DISCARDED, MEASURED, ORDINARY
from gradwire.recipes import Decision, recipe
from gradwire.step.step import Step
from tests.support.rig import Rig, gradients

WHOLE_S = 1.0
FAST, SLOW = 0.98, 0.9
"""Seconds of a step after which the rank that computes longest has its last gradient."""


class Ran(NamedTuple):
    """One rank: of each step whether it measured, whether it was taken apart, and the bits of its mean."""

    measures: list[bool]
    is_serial: list[bool]
    plans: list[str]
    means: list[list[float]]
    why: str
    facts: Any


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Ran]]:
    """Runs two ranks, whose steps take as long as is told for each; the first one computes the longer."""
    here = threading.local()
    monkeypatch.setattr(Step, "lasted_s", lambda _step: WHOLE_S)
    monkeypatch.setattr(Step, "computing_s", property(lambda _step: here.computing_s))
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", {"fp16": 0.0004})

    def of(
        text: str, computing_s: Callable[[int], float], steps: int = DISCARDED + ORDINARY + 1
    ) -> list[Ran]:
        def rank(comm: Comm) -> Ran:
            rig, ran = Rig(comm, text), Ran([], [], [], [], "", None)
            for step in range(steps):
                here.computing_s = computing_s(step) if comm.rank == 0 else 0.5 * WHOLE_S
                ran.measures.append(rig.reducer.measuring)
                ran.is_serial.append(rig.reducer.is_serial)
                outcome = rig.step(gradients(comm.rank, step))
                assert outcome.error is None
                ran.plans.append(outcome.step.recipe)
                ran.means.append(outcome.flat().tolist())
            return ran._replace(why=rig.reducer.layout.main.why, facts=rig.reducer.facts)

        return run_ranks(2, rank)

    return of


@pytest.mark.parametrize(("text", "computing_s"), [("auto", FAST), ("auto(target=0.8)", SLOW)])
def test_where_communication_hides_dense_stays_and_no_step_is_taken_apart(
    text: str, computing_s: float, run: Callable[..., list[Ran]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank waits for half of each step, for the first one."""

    def surveyed(*_: object) -> None:
        pytest.fail("nothing has to be probed")

    monkeypatch.setattr("gradwire.control.warmup.surveyed", surveyed)
    measured = DISCARDED + ORDINARY
    for ran in run(text, lambda _step: computing_s, steps=measured + 3):
        assert ran.measures == measured * [True] + 3 * [False]
        assert not any(ran.is_serial)
        assert set(ran.plans) == {"dense"}
        share = f"{1 - computing_s:.1%}"
        assert ran.why == f"communication hides as it is: at most {share} of a step waits for it"
        assert ran.facts is None


@pytest.mark.parametrize(("text", "computing_s"), [("auto", SLOW), ("auto(target=0.99)", FAST)])
def test_where_it_does_not_steps_are_taken_apart(
    text: str, computing_s: float, run: Callable[..., list[Ran]]
) -> None:
    measured = DISCARDED + ORDINARY + MEASURED
    for ran in run(text, lambda _step: computing_s, steps=measured + 1):
        assert ran.measures == measured * [True] + [False]
        assert ran.is_serial == (DISCARDED + ORDINARY) * [False] + MEASURED * [True] + [False]
        assert ran.facts is not None


def test_the_means_are_those_of_dense(run: Callable[..., list[Ran]]) -> None:
    for here, dense in zip(*(run(text, lambda _step: FAST) for text in ("auto", "dense")), strict=True):
        assert here.means == dense.means


def test_steps_that_vary_leave_it_open(run: Callable[..., list[Ran]]) -> None:
    """3 % are exposed in the median, and between 0 and 6 %."""
    vary = run("auto", lambda step: 1.0 - 0.03 * (step % 3))
    assert all(ran.measures[-1] for ran in vary)
    disturbed = run("auto", lambda step: FAST if step % 6 else 0.5)
    assert not any(ran.measures[-1] for ran in disturbed), "a few say nothing"


def _hidden(text: str, shares: list[float]) -> str | None:
    decision = recipe(text).build().next
    assert isinstance(decision, Decision)
    following = decision.hidden(shares)
    return None if following is None else following.text


def test_only_a_share_that_certainly_leaves_the_target_within_reach_counts() -> None:
    assert _hidden("auto", 12 * [0.049]) == "dense"
    assert _hidden("auto", 12 * [0.051]) is None
    assert _hidden("auto(target=1.0)", 12 * [0.0]) is None
    assert _hidden("auto", 6 * [0.02] + 6 * [0.04]) == "dense"
    assert _hidden("auto", 6 * [0.0] + 6 * [0.06]) is None


def test_dense_that_stays_is_watched() -> None:
    decision = recipe("auto").build().next
    assert decision is not None
    stays = decision.hidden(12 * [0.01])
    assert stays is not None
    assert stays.watch is not None
    assert not stays.watch.ends
    assert stays.next is None


@pytest.mark.parametrize("text", ["covap", "mergecomp"])
def test_recipes_that_always_compress_ask_for_nothing_of_it(text: str) -> None:
    decision = recipe(text).build().next
    assert decision is not None
    assert decision.hidden(12 * [0.0]) is None
