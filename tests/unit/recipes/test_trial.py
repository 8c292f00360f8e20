"""A composition on trial against dense: what is judged, what follows, and what becomes of the unsent."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.decide.profiler import DISCARDED, MEASURED, ORDINARY
from gradwire.engine import state
from gradwire.engine.layout import build
from gradwire.engine.preparing import kernels_for
from gradwire.engine.step import Step
from gradwire.planning.costs import Backward, Link, Network
from gradwire.planning.facts import Facts, Observed, Watched
from gradwire.recipes import Composition, recipe
from gradwire.recipes.base import Judge
from gradwire.recipes.trial import AGAIN, COUNTED, SKIPPED, back_to_dense, on_trial
from tests.support.rig import Rig, flat, gradients, specs

DENSE_S = 0.1


def _fixed(text: str) -> Composition:
    return recipe(text).build()


def _judge(composition: Composition) -> Judge:
    assert composition.watch is not None
    return composition.watch.judge(Watched(2, (10,)))


def _follows(text: str, steps_s: list[float]) -> list[Composition | None]:
    judge = _judge(on_trial(replace(_fixed(text), why="CCR 4"), DENSE_S))
    return [judge(Observed(step, previous_s, 0.0)) for step, previous_s in enumerate([0.0, *steps_s])]


def test_a_composition_whose_steps_are_faster_stays_and_is_not_judged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    *before, stays = _follows("int4", SKIPPED * [9.0] + 4 * [5.0] + 5 * [0.0999])
    assert before == [None] * (SKIPPED + COUNTED)
    assert stays is not None
    assert stays.text == _fixed("int4").text
    assert stays.watch is None
    assert stays.why == "CCR 4; on trial it took 100 ms"
    assert not caplog.records


@pytest.mark.parametrize("slow_s", [DENSE_S, 0.116])
def test_dense_comes_back_where_steps_are_not_faster_and_a_log_line_says_so(
    slow_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    *before, back = _follows("fp16", SKIPPED * [0.0] + SKIPPED * [9.0] + 4 * [0.01] + 5 * [slow_s])
    assert not any(before)
    assert back is not None
    assert back.text == "dense"
    assert back.watch is None
    told = f"on trial it took {slow_s * 1e3:.0f} ms, and dense took 100 ms"
    assert back.why == f"fp16 was tried: CCR 4; {told}"
    assert [(each.name, each.levelno) for each in caplog.records] == [("gradwire", logging.WARNING)]
    assert caplog.messages == [f"back to dense: fp16, {told}"]


def test_what_remembers_is_followed_by_what_sends_everything_and_then_by_dense() -> None:
    *_, back = _follows("leader_topk", (SKIPPED + COUNTED) * [0.116])
    assert back is not None
    assert "sending what is unsent" in back.why
    judge = _judge(back)
    proposals = [judge(Observed(step, 0.1, 0.0)) for step in range(2 * AGAIN + 1)]
    assert [step for step, each in enumerate(proposals) if each is not None] == [0, AGAIN, 2 * AGAIN]
    last = proposals[0]
    assert last is not None
    assert (last.text, last.watch) == ("dense", None)


def test_a_trial_asks_for_no_kernels_but_those_that_run_in_it() -> None:
    def asked(composition: Composition) -> frozenset[str]:
        return kernels_for(build(specs(), composition, None, torch.device("meta")))

    for text in ("int4", "fp16", "leader_topk"):
        alone = asked(_fixed(text))
        assert asked(on_trial(_fixed(text), DENSE_S)) <= alone | {"folding"}


LINK = Network(Link(6e-3, 1e-9))
"""On which three ranks expect 130 ms of a leader's choice, and 82 of int4."""
CHOSEN = {2: "topk", 3: "int4"}
"""By world."""
MEASURING = DISCARDED + ORDINARY + MEASURED
TRIAL = SKIPPED + COUNTED + 1
"""A step's time is known at the next verdict."""
STEPS = MEASURING + TRIAL + 3
"""The trial, and some beyond."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that steps take by the name of what runs; a tenth more on the second rank."""
    takes = {"dense": 0.1, "local_every": 0.1}

    def lasted_s(step: Step) -> float:
        return takes[step.plan.split("(")[0]] * (1.1 if step.small[-1].comm.rank == 1 else 1.0)

    def surveyed(facts: Facts, *_: object) -> Facts:
        numel = tuple(spec.numel for spec in specs())
        ready_s = tuple(0.01 * (number + 1) / len(numel) for number in range(len(numel)))
        measured = replace(facts, backward_s=0.01, allreduce_s=0.08, gradient_bytes=4.0 * sum(numel))
        return replace(measured, backward=Backward(0.0, ready_s, numel, 0.01), network=LINK)

    monkeypatch.setattr(Step, "lasted_s", lasted_s)
    monkeypatch.setattr("gradwire.engine.decider.surveyed", surveyed)
    return takes


class Ran(NamedTuple):
    """One rank: plans by step, what came in less what went out, what is left, and at the end the reason."""

    plans: list[str]
    missing: dict[str, Tensor]
    memory: dict[str, Tensor]
    why: str
    dense_s: float | None


def _run(world: int, idle: int = 0) -> list[Ran]:
    """By rank. In the first `idle` steps after the trial the last one has no gradient of the first weight."""

    def rank(comm: Comm) -> Ran:
        rig, plans = Rig(comm, "auto"), []
        missing = {name: torch.zeros_like(each).double() for name, each in gradients(0, 0).items()}
        for step in range(STEPS + idle + AGAIN * (idle > 0)):
            grads = gradients(comm.rank, step)
            if 0 <= step - MEASURING - TRIAL < idle and comm.rank == comm.world - 1:
                grads["first.weight"].zero_()
            outcome = rig.step(grads)
            assert outcome.error is None
            plans.append(outcome.step.plan.split("(")[0])
            for name in missing:
                missing[name] += grads[name].double() - outcome.mean[name].double()
        facts = rig.engine.facts
        assert facts is not None
        return Ran(plans, missing, rig.memory, rig.engine.layout.main.why, facts.dense_s)

    return run_ranks(world, rank)


def _lost(ranks: list[Ran]) -> float:
    """The largest element of what came in and neither went out nor is left, in the mean over ranks."""
    unaccounted = [
        flat(
            {
                name: each - ran.memory.get(name, torch.zeros(())).double()
                for name, each in ran.missing.items()
            }
        )
        for ran in ranks
    ]
    return float(torch.stack(unaccounted).mean(0).abs().max())


ROUNDING = STEPS * 4 * 32 * torch.finfo(torch.float32).eps
"""Every step rounds folds, sums and subtractions of numbers below 32."""


@pytest.mark.parametrize("world", [2, 3])
def test_slower_steps_bring_dense_back_on_all_ranks_with_all_that_was_unsent(
    world: int, clock: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = CHOSEN[world]
    clock[chosen] = 0.101
    ranks = _run(world)
    tried = MEASURING * ["dense"] + TRIAL * [chosen] + ["local_every"]
    assert all(ran.plans == tried + (STEPS - len(tried)) * ["dense"] for ran in ranks)
    assert len({(ran.why, ran.dense_s) for ran in ranks}) == 1
    assert f"on trial it took {101 * 1.1:.0f} ms, and dense took 110 ms" in ranks[0].why
    assert not any(ran.memory for ran in ranks), "dense remembers nothing"
    assert _lost(ranks) < ROUNDING
    assert len(caplog.records) == world


def test_faster_steps_keep_what_was_chosen(clock: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    clock["int4"] = 0.099
    ranks = _run(3)
    assert all(ran.plans[MEASURING:] == (STEPS - MEASURING) * ["int4"] for ran in ranks)
    assert all(ran.memory for ran in ranks)
    assert ranks[0].why.endswith("on trial it took 109 ms")
    assert _lost(ranks) < ROUNDING
    assert not caplog.records


def test_dense_waits_for_a_parameter_that_is_idle_on_some_rank(clock: dict[str, float]) -> None:
    """Its memory would be lost: it neither sends nor changes while the gradient is zero."""
    clock["int4"] = 0.2
    ranks = _run(3, idle=4)
    after = ranks[0].plans[MEASURING + TRIAL :]
    assert all(ran.plans == ranks[0].plans for ran in ranks)
    assert after == (AGAIN + 1) * ["local_every"] + (len(after) - AGAIN - 1) * ["dense"]
    assert _lost(ranks) < 2 * ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_step_sends_what_is_unsent_in_16_bits_too(dtype: torch.dtype) -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, "auto", dtype=dtype)
        rig.engine.install(recipe("int4").build())
        for step in range(3):
            rig.step(gradients(comm.rank, step, dtype))
        rig.engine.install(back_to_dense(recipe("int4").build(), "a test"))
        plans = [rig.step(gradients(comm.rank, step, dtype)).step.plan for step in range(3, 6)]
        assert not rig.memory
        return plans

    assert run_ranks(2, rank) == [["local_every(interval=1)", "dense", "dense"]] * 2


def test_back_to_dense_from_what_remembers_nothing_is_dense_at_once() -> None:
    assert back_to_dense(_fixed("fp16"), "why").text == "dense"


@pytest.mark.parametrize(
    "running", [on_trial(_fixed("int4"), DENSE_S), back_to_dense(_fixed("int4"), "why")], ids=lambda c: c.text
)
def test_a_checkpoint_goes_on_with_what_ran_and_without_a_trial(running: Composition) -> None:
    def rank(comm: Comm) -> tuple[str, bool, bool]:
        rig, again = Rig(comm, "auto"), Rig(comm, "auto")
        rig.engine.install(replace(_fixed("int4"), text="int4"))
        rig.step(gradients(comm.rank, 0))
        rig.engine.install(running)
        saved = state.save(rig.engine)
        state.load(again.engine, saved)
        same = all(torch.equal(again.memory[name], each) for name, each in rig.memory.items())
        assert any(each.any() for each in rig.memory.values())
        return again.engine.layout.main.text, again.engine.layout.main.watch is None, same

    assert run_ranks(1, rank) == [(running.text, True, True)]
