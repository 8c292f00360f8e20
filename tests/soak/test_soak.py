"""A short chaos run on real ranks, and whether the judge of long ones sees what it must."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from gradwire.comm import Comm, run_ranks
from gradwire.errors import GradwireError, TransportError
from gradwire.step.status_vote import Votes
from tests.soak.chaos import LATE_S, Attempt, carried_out, judged
from tests.soak.endurance import Samples, endured, grown
from tests.soak.plans import FATAL, INNER, RECIPES, SOURCES, WORLD, Fault, Plan, drawn
from tests.soak.scenes import Accident, Run, WrapperFailed, _step, accident
from tests.support.rig import ONE_BUCKET, Rig, gradients


@pytest.mark.rest
@pytest.mark.process
def test_a_run_with_faults_ends_as_one_without(tmp_path: Path) -> None:
    inner = tuple(Fault(3 * n + 2, n % WORLD, kind) for n, kind in enumerate(INNER))
    outer = (Fault(5, 2, "pause"), Fault(13, 1, "kill"))
    # A fifth of the elements: messages that are too long to travel twice.
    plan = Plan(1, "ddp", "topk(ratio=0.2)", 24, 4, checksums=True, inner=inner, outer=outer)
    outcome = carried_out(plan, tmp_path)
    assert not outcome.complaints
    assert outcome.lost is not None, "books were compared"
    assert outcome.counts["starts"] == 2
    # Those in front of the save that it goes on from befall it once.
    assert outcome.counts["exceptions"] >= 3
    assert outcome.counts["skipped"] >= 2
    assert outcome.counts["damaged"] == 1


# -- plans


def test_a_seed_is_a_plan() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(11)


def test_seeds_bring_every_fault_source_and_recipe() -> None:
    plans = [drawn(seed) for seed in range(400)]
    assert {each.source for each in plans} == set(SOURCES)
    assert {each.recipe for each in plans} == set(RECIPES)
    assert {fault.kind for each in plans for fault in each.inner} == set(INNER)
    assert {fault.kind for each in plans for fault in each.outer} == {*FATAL, "pause"}
    assert {fault.rank for each in plans for fault in each.outer} == set(range(WORLD))


# -- what is planted


@pytest.mark.parametrize("text", RECIPES)
def test_whatever_is_planted_is_in_the_status_vote_of_its_step(text: str) -> None:
    """Otherwise a plan asks of a recipe what it does not promise: the others commit, and nobody tells them.

    `RECIPES` are all that any seed draws. In some steps a recipe may have nothing to encode or to decode.
    """
    told: list[bool] = []

    def noted(votes: Votes) -> BaseException | None:
        told.append(votes.rows[0].failed)
        return honest(votes)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, text)
        for where in ("compensate", "encode", "decode"):
            befell = 0
            for step in range(3):
                told.clear()
                with accident(rig.reducer, where):
                    # In one bucket, so that all units are on the wire when the last gradient has come.
                    error = rig.step(gradients(0, step), ONE_BUCKET).error
                assert error is None or isinstance(error, Accident)
                assert told == [error is not None], f"{where}, step {step}"
                befell += error is not None
            assert befell, f"no exception in {where}"

    honest = Votes.error
    with mock.patch.object(Votes, "error", noted):
        run_ranks(1, rank)


@pytest.mark.parametrize(
    ("raised", "kind"), [(RuntimeError, WrapperFailed), (TransportError, TransportError)]
)
def test_an_error_of_the_wrappers_own_is_told_from_ours(
    raised: type[RuntimeError], kind: type[RuntimeError]
) -> None:
    model = mock.Mock(side_effect=raised("Connection closed by peer"))
    run = SimpleNamespace(reducer=SimpleNamespace(step=1), optimizer=mock.Mock(), model=model)
    nothing = mock.patch("tests.soak.scenes.batch", return_value=(None, None))
    with nothing, pytest.raises(kind) as caught:
        _step(cast(Run, run), None)
    assert isinstance(caught.value, GradwireError) == issubclass(raised, GradwireError)


# -- the judge


def _ended(digest: str = "a", **also: Any) -> dict[str, Any]:
    well = {"ended": "well", "seen": [], "intact": True, "digest": digest}
    return {"value": {**well, "lost": {"apart": 0.0, "largest": 1.0}, **also}}


def _lost(kind: str, raised_s: float = 101.0) -> dict[str, Any]:
    return {"value": {"ended": "lost", "seen": [(4, kind, "")], "intact": True, "raised_s": raised_s}}


KILL = Fault(4, 0, "kill")
PLAN = Plan(0, "ddp", "topk(ratio=0.05)", 10, 5, inner=(Fault(2, 1, "compensate"),), outer=(KILL,))
QUIET = Attempt({rank: _ended() for rank in range(WORLD)})


def _failed(rank: int) -> list[tuple[int, str, str]]:
    return [(2, "Accident" if rank == 1 else "PeerFailed", "")]


def _loud() -> list[Attempt]:
    """A kill of rank 0, a new start, and in that an exception on rank 1."""
    survivors = {rank: _lost("TransportError") for rank in range(1, WORLD)}
    again = {rank: _ended(seen=_failed(rank)) for rank in range(WORLD)}
    return [Attempt(survivors, KILL, 100.0), Attempt(again)]


def test_a_run_that_keeps_every_promise_draws_no_complaint() -> None:
    outcome = judged(PLAN, QUIET, _loud())
    assert outcome.complaints == []
    assert outcome.slowest_s == 1.0
    assert outcome.counts == {
        "starts": 2, "kills": 1, "stalls": 0, "pauses": 0, "exceptions": 1, "damaged": 0, "skipped": 0
    }  # fmt: skip


def _change(attempt: int, rank: int, **changed: Any) -> Callable[[list[Attempt]], None]:
    return lambda loud: loud[attempt].results[rank]["value"].update(changed)


BROKEN: dict[str, tuple[Callable[[list[Attempt]], None], str]] = {
    "replicas": (_change(1, 3, digest="b"), "replicas of the disturbed run differ"),
    "neighbours": (lambda loud: [_change(1, r, digest="b")(loud) for r in (1, 3)] and None, "parameters of"),
    "trace": (lambda loud: [_change(1, r, digest="b")(loud) for r in range(WORLD)] and None, "left a trace"),
    "lost": (_change(1, 0, lost={"apart": 1.0, "largest": 1.0}), "the disturbed run lost"),
    "memory": (_change(1, 2, intact=False), "rank 2's memory has changed"),
    "silence": (_change(1, 2, seen=[]), "step 2 failed as"),
    "two culprits": (_change(1, 2, seen=_failed(1)), "step 2 failed as"),
    "finite": (_change(1, 2, seen=[(3, "skipped", "a gradient is finite")]), "step 3 is skipped on rank 2"),
    "skipped alone": (_change(1, 2, seen=[*_failed(2), (3, "skipped", "no gradient is finite")]), "step 3"),
    "untyped": (_change(0, 2, seen=[(4, "RuntimeError", "")]), "rank 2 raised RuntimeError"),
    "late": (_change(0, 2, raised_s=101.0 + LATE_S), "rank 2 raised"),
    "broke off": (lambda loud: loud[0].results.update({2: {"error": "Traceback"}}), "rank 2 broke off"),
    "hangs": (lambda loud: loud.__setitem__(0, loud[0]._replace(hung=(3,))), "rank 3 hangs"),
    "never ends": (lambda loud: loud[1].results.pop(3) and None, "did not end well"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_promise_draws_a_complaint(name: str) -> None:
    loud = copy.deepcopy(_loud())
    breaks, said = BROKEN[name]
    breaks(loud)
    complaints = judged(PLAN, QUIET, loud).complaints
    assert any(said in each for each in complaints), complaints


@pytest.mark.parametrize(("source", "allowed"), [("ddp", True), ("nodes", True), ("plain", False)])
def test_an_error_of_the_wrappers_own_is_no_broken_promise_where_there_is_one(
    source: str, allowed: bool
) -> None:
    loud = _loud()
    loud[0].results[2] = _lost("WrapperFailed")
    complaints = judged(replace(PLAN, source=source), QUIET, loud).complaints
    assert any("rank 2 raised WrapperFailed" in each for each in complaints) != allowed


# -- endurance


@pytest.mark.rest
@pytest.mark.process
def test_what_a_process_holds_stays_as_it_is(tmp_path: Path) -> None:
    for samples in endured(200, tmp_path / "run"):
        assert samples[-1]["step"] == 200
        assert grown(samples) == []


def _samples(**a_step: float) -> Samples:
    """Of 10,000 steps: what is held grows by so much in each."""
    base = {"threads": 5.0, "descriptors": 20.0, "objects": 1e5, "resident_bytes": 3e8}
    return [
        {"step": step, "at_s": 0.0, **{name: base[name] + a_step.get(name, 0.0) * step for name in base}}
        for step in range(0, 10_001, 250)
    ]


@pytest.mark.parametrize(
    "leak", [{"threads": 2e-4}, {"descriptors": 2e-4}, {"objects": 0.02}, {"resident_bytes": 200.0}]
)
def test_what_leaks_is_seen(leak: dict[str, float]) -> None:
    assert grown(_samples(**leak)) != []
    assert next(iter(leak)) in grown(_samples(**leak))[0]


def test_what_is_held_when_a_run_begins_is_no_leak() -> None:
    samples = _samples()
    samples[0]["resident_bytes"] = samples[0]["objects"] = 0.0
    assert grown(samples) == []
