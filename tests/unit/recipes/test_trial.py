"""Trials on all ranks: what is judged, what follows, and what becomes of the unsent."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.planning.change_detection import noise_of
from gradwire.planning.choice import Comparison, Option
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.planning.lateness import LEAST
from gradwire.planning.profiler import DISCARDED, MEASURED, ORDINARY
from gradwire.planning.tuning import USUAL, Tuning
from gradwire.recipes import Composition, recipe
from gradwire.recipes.auto import auto
from gradwire.recipes.base import Judge
from gradwire.recipes.dense import dense
from gradwire.recipes.flush import AGAIN, flushing
from gradwire.recipes.trial import (
    COUNTED,
    DECIDED,
    FEWEST,
    MOST_TRIALS,
    SKIPPED,
    on_trial,
    watched,
)
from gradwire.step.step import Step
from tests.support.rig import Rig, flat, gradients, specs
from tests.support.tiers import rest

DENSE_S = 0.1
OPTIONS = (
    Option("int4", "int4", 0.06, 1e3, 0.18, calls=2),
    Option("fp16", "fp16", 0.08, 2e3, 0.0004, calls=1),
    Option("topk(ratio=0.1)", "topk(ratio=0.1)", 0.055, 8e2, 1.2, calls=2),
    Option("leader_topk(ratio=0.1)", "leader_topk(ratio=0.1)", 0.050, 4e2, 1.6, calls=2),
)
COMPARISON = Comparison(OPTIONS, 0.0, 0.01, DENSE_S, 4e3, noise=9.0, limit=2.0)
"""Nothing is clear before a trial has had all of its steps."""


def _fixed(text: str) -> Composition:
    return recipe(text).build()


def _judge(composition: Composition, tuning: Tuning = USUAL) -> Judge:
    assert composition.watch is not None
    return composition.watch.judge(Watched(2, (10,), tuning))


def _shown(step: int, previous_s: float, late: float | None = 0.1, *, known: bool = True) -> StepObservation:
    return StepObservation(step, previous_s, 0.0, late=late, late_is_known=known)


def _follows(running: Composition, took_s: float, late: float = 0.1, *, known: bool = True) -> Composition:
    """What comes after a trial, in which the steps that are not counted and four others are odd ones out."""
    judge = _judge(running)
    steps_s = [0.0, *SKIPPED * [9.0], *4 * [5.0], *5 * [took_s]]
    *before, following = [judge(_shown(step, each, late, known=known)) for step, each in enumerate(steps_s)]
    assert len(before) == SKIPPED + COUNTED
    assert not any(before)
    assert following is not None
    return following


def _is_settled(composition: Composition) -> bool:
    return composition.watch is None or not composition.watch.ends


ALONE = replace(COMPARISON, options=OPTIONS[:2])
"""Nothing promises more than the first."""


def test_a_recipe_whose_steps_are_as_predicted_stays(caplog: pytest.LogCaptureFixture) -> None:
    stays = _follows(on_trial("int4", ALONE, auto), 0.06)
    assert _is_settled(stays)
    assert stays.text == _fixed("int4").text
    assert stays.why.startswith("int4: 60 ms a step instead of 100 ms (10 ms without communication)")
    assert "; residual ratio 0.1" in stays.why
    [row] = [row for row in stays.table if row.verdict == "runs"]
    assert (row.recipe, row.predicted_step_s, row.measured_step_s) == ("int4", 0.06, 0.06)
    assert not caplog.records


def test_what_stays_although_it_misses_its_target_says_so() -> None:
    """10 ms without communication, of which 60 ms are 17 %."""
    stays = _follows(on_trial("int4", ALONE, auto), 0.06)
    assert stays.why.endswith("; scaling efficiency is 17%, below the target of 95%")
    reaches = replace(ALONE, backward_s=0.058)
    assert "missed" not in _follows(on_trial("int4", reaches, auto), 0.06).why


def test_what_promises_more_is_tried_next() -> None:
    second = _follows(on_trial("int4", COMPARISON, auto), 0.06)
    assert second.text == _fixed("topk(ratio=0.1)").text
    assert not _is_settled(second)
    assert second.why.startswith("trial 2: topk(ratio=0.1) is predicted to take 55 ms a step")
    assert "before it, int4: 60 ms a step" in second.why
    third = _follows(on_trial("int4", ALONE, auto), 0.09)
    assert third.text == _fixed("fp16").text, "the first was slower than the second is predicted to be"


def test_a_trial_ends_at_once_when_more_is_late_than_may_be() -> None:
    judge = _judge(on_trial("topk(ratio=0.1)", replace(COMPARISON, limit=0.3), auto))
    steps_s = [0.0, *SKIPPED * [9.0], 0.05]
    *before, following = [judge(_shown(step, each, 1.2, known=False)) for step, each in enumerate(steps_s)]
    assert not any(before)
    assert following is not None
    [row] = [row for row in following.table if row.recipe == "topk(ratio=0.1)"]
    assert (row.late, row.verdict) == (1.2, "residual ratio above 0.3")


def test_a_lateness_that_still_rises_at_the_end_is_not_settled_on() -> None:
    after = _follows(on_trial("int4", replace(ALONE, options=OPTIONS[:1]), auto), 0.06, known=False)
    assert (after.text, _is_settled(after)) == ("dense", True)
    assert {row.recipe: row.verdict for row in after.table}["int4"] == "its residual still grew"


def test_a_milder_one_follows_where_too_much_is_late_for_long() -> None:
    known = replace(ALONE, limit=0.3).after_trial("fp16", 0.08, None)
    stays = _follows(on_trial("int4", known, auto), 0.06)
    assert stays.text == _fixed("int4").text
    judge = _judge(stays)
    assert judge(_shown(0, 0.06, 0.36)) is None, "not for a little more"
    milder = judge(_shown(1, 0.06, 0.4))
    assert milder is not None
    assert milder.text == _fixed("fp16").text
    assert _is_settled(milder)
    assert milder.why.startswith("the residual ratio was 0.4 under int4; fp16: 80 ms a step")


def test_what_resumes_and_is_too_late_is_decided_anew() -> None:
    judge = _judge(watched(_fixed("int4"), auto, 0.3))
    assert judge(_shown(0, 0.06, None)) is None
    anew = judge(_shown(1, 0.06, 0.4))
    assert anew is not None
    assert anew.next is not None, "it measures"


def test_dense_comes_back_where_nothing_beats_it_and_a_log_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gradwire")
    back = _follows(on_trial("fp16", replace(COMPARISON, options=OPTIONS[1:2]), auto), 0.6)
    assert back.text == "dense"
    assert _is_settled(back)
    missed = "; scaling efficiency is 10%, below the target of 95%; "
    assert back.why.startswith(
        f"dense stays, 100 ms a step{missed}tried fp16: 600 ms a step instead of 100 ms"
    )
    assert [row.verdict for row in back.table if row.recipe == "dense"] == ["runs"]
    assert [(each.name, each.levelno) for each in caplog.records] == [("gradwire", logging.INFO)]
    assert caplog.messages[0].startswith("back to dense: fp16: 600 ms a step")


def test_after_the_last_trial_the_best_of_those_tried_runs() -> None:
    """It came with the first trial; what was not tried is predicted to be faster still, and is not asked."""
    known = COMPARISON.after_trial("int4", 0.062, 0.1).after_trial("topk(ratio=0.1)", 0.08, 1.0)
    cheap = tuple(
        replace(each, predicted_s=0.02) if each.recipe == "fp16" else each for each in known.options
    )
    last = on_trial("leader_topk(ratio=0.1)", replace(known, options=cheap), auto, MOST_TRIALS)
    best = _follows(last, 0.09)
    assert _is_settled(best)
    assert best.text == _fixed("int4").text
    earlier = on_trial("leader_topk(ratio=0.1)", replace(known, options=cheap), auto, MOST_TRIALS - 1)
    assert _judge(_follows(earlier, 0.075)), "then fp16 is tried, once what is unsent has been sent"


LINKS = (Link(1e-3, 1e-8), Link(1e-3, 4e-8))


@pytest.mark.parametrize("change", [{"link_change": LINKS}, {"step_change_s": (0.1, 0.2)}], ids=list)
@pytest.mark.parametrize(("took_s", "text", "kept"), [(0.06, "int4", 7), (0.6, "dense", 9)])
def test_what_has_stayed_is_decided_anew_once_link_or_steps_have_changed(
    change: dict[str, Any], took_s: float, text: str, kept: int
) -> None:
    tuning = Tuning(kept_steps=7, kept_dense_steps=9)
    stays = _follows(on_trial("int4", COMPARISON, auto, MOST_TRIALS), took_s)
    judge = _judge(stays, tuning)
    assert stays.text == _fixed(text).text
    calm = _shown(0, 0.06)
    assert not any(judge(calm) for _step in range(3))
    assert judge(replace(calm, **change)) is None, "not so soon"
    later = [judge(calm) for _step in range(kept - 4)]
    assert not any(later[:-1])
    assert later[-1] is not None
    assert later[-1].next is not None, "it measures"
    calm_for_long = _judge(stays, tuning)
    assert not any(calm_for_long(calm) for _step in range(2 * kept))


LINK = Network(Link(1e-3, 8e-6))
"""On which a dense step is predicted to take about what the clock says, and fewer bytes less."""
MEASURING = DISCARDED + ORDINARY + MEASURED
TRIAL = 2 * LEAST + 1
"""A step's time and its weight are known at the next verdict. Steps that do not vary leave nothing open, so
that a trial ends when its lateness is known."""
LEFT = DECIDED - MEASURING
STEPS = MEASURING + TRIAL + 3
"""The trial, and some beyond."""
FIRST = "int8"
"""The only candidate, where a test names no others."""


def _name(plan: str) -> str:
    """The recipe's, whatever its boundaries."""
    found = recipe(plan)
    return _name(found.options["inner"]) if found.name == "mergecomp" else found.name


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that steps take by the name of what runs; a tenth more on the second rank."""
    takes = {"dense": 0.2, "local_every": 0.2}

    def lasted_s(step: Step) -> float:
        return takes[_name(step.recipe)] * (1.1 if step.flight.small[-1].comm.rank == 1 else 1.0)

    def surveyed(facts: Facts, *_: object) -> Facts:
        numel = tuple(spec.numel for spec in specs())
        ready_s = tuple(0.01 * (number + 1) / len(numel) for number in range(len(numel)))
        measured = replace(facts, backward_s=0.01, allreduce_s=0.08, gradient_bytes=4.0 * sum(numel))
        return replace(measured, backward=BackwardTiming(0.0, ready_s, numel, 0.01), network=LINK)

    def coded(_exchange: object, _text: str, *_: object, **_named: object) -> CodecCost:
        return CodecCost(Line(1e-5, 0.0), Line(0.0, 0.0))

    monkeypatch.setattr(Step, "lasted_s", lasted_s)
    monkeypatch.setattr("gradwire.control.warmup.surveyed", surveyed)
    monkeypatch.setattr("gradwire.control.auto.codec_cost", coded)
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", {FIRST: 0.01})
    return takes


class Ran(NamedTuple):
    """One rank: plans by step, what came in less what went out, what is left, and at the end the reason."""

    plans: list[str]
    missing: dict[str, Tensor]
    memory: dict[str, Tensor]
    why: str
    facts: Facts
    late: float | None


def _run(world: int, steps: int = STEPS, idle: int = 0) -> list[Ran]:
    """By rank. In the first `idle` steps after the trial the last one has no gradient of the first weight."""

    def rank(comm: Comm) -> Ran:
        rig, plans = Rig(comm, "auto"), []
        missing = {name: torch.zeros_like(each).double() for name, each in gradients(0, 0).items()}
        for step in range(steps + idle + AGAIN * (idle > 0)):
            grads = gradients(comm.rank, step)
            if 0 <= step - MEASURING - TRIAL < idle and comm.rank == comm.world - 1:
                grads["first.weight"].zero_()
            outcome = rig.step(grads)
            assert outcome.error is None
            plans.append(_name(outcome.step.recipe))
            for name in missing:
                missing[name] += grads[name].double() - outcome.mean[name].double()
        facts = rig.reducer.facts
        assert facts is not None
        return Ran(plans, missing, rig.memory, rig.reducer.layout.main.why, facts, rig.reducer.late)

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
"""Every step rounds compensations, sums and subtractions of numbers below 32."""


def _settles_after(
    steps_s: Callable[[str, int], float], comparison: Comparison, left: int = LEFT
) -> tuple[int, str]:
    """Steps on trial until something is settled, and what; `steps_s` by recipe and number of the step."""
    running, judge, steps, previous_s = on_trial("int4", comparison, auto, left=left), None, 0, 0.0
    while not _is_settled(running):
        judge, previous_s = (judge, previous_s) if judge else (_judge(running), 0.0)
        following = judge(_shown(steps, previous_s))
        previous_s, steps = steps_s(running.text, steps), steps + 1
        running, judge = (running, judge) if following is None else (following, None)
    return steps, running.text


def _decides(comparison: Comparison) -> tuple[str | None, str | None]:
    """What runs, and what is tried next."""
    best, following = comparison.best(), comparison.next_trial()
    return best and best.recipe, following and following.recipe


def _noisy(takes: Callable[[str], float], noise: float, seed: int) -> Callable[[str, int], float]:
    draw = random.Random(seed)
    return lambda text, _step: takes(text) * max(draw.gauss(1.0, noise), 0.1)


def test_all_is_settled_within_80_steps_whatever_their_noise() -> None:
    assert MEASURING + LEFT == DECIDED == 80
    quiet = replace(ALONE, noise=0.0)
    assert _settles_after(lambda *_: 0.06, quiet) == (SKIPPED + FEWEST + 1, _fixed("int4").text)
    steps, text = _settles_after(lambda *_: 0.5, replace(COMPARISON, noise=0.0))
    assert (steps, text) == (MOST_TRIALS * (SKIPPED + FEWEST + 1), "dense")
    for seed in range(20):
        steps, text = _settles_after(_noisy(lambda _: 0.06, 0.1, seed), replace(COMPARISON, noise=0.1))
        assert steps <= LEFT
        assert text != "dense"
        steps, _ = _settles_after(_noisy(lambda _: 0.093, 0.3, seed), replace(COMPARISON, noise=0.3))
        assert steps <= LEFT


@pytest.mark.parametrize("takes_s", [0.05, 0.07, 0.08, 0.094, 0.096, 0.15])
@pytest.mark.parametrize("noise", rest([0.02, 0.1, 0.3], but=[0.1]))
def test_a_trial_that_ends_early_goes_on_as_one_that_knew_the_truth(takes_s: float, noise: float) -> None:
    """But in less than 1 % of cases, and three standard deviations of the number of cases that this is."""
    wrong, tries, draw = 0, 400, random.Random(f"{takes_s} {noise}")
    for _ in range(tries):
        found = noise_of([draw.gauss(1.0, noise) for _ in range(ORDINARY)])
        comparison = replace(COMPARISON, noise=found)
        truth = _decides(comparison.after_trial("int4", takes_s, 0.1))
        steps_s: list[float] = []
        while len(steps_s) < COUNTED:
            steps_s.append(takes_s * max(draw.gauss(1.0, noise), 0.01))
            if len(steps_s) >= FEWEST and comparison.is_clear("int4", steps_s, 0.1):
                wrong += _decides(comparison.after_trial("int4", median(steps_s), 0.1)) != truth
                break
    assert wrong <= 0.01 * tries + 3 * (0.01 * tries) ** 0.5


@pytest.mark.parametrize("world", [2, 3])
def test_slower_steps_bring_dense_back_on_all_ranks_with_all_that_was_unsent(
    world: int, clock: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradwire")
    clock[FIRST] = 0.3
    ranks = _run(world)
    tried = MEASURING * ["dense"] + TRIAL * [FIRST] + ["local_every"]
    assert all(ran.plans == tried + (STEPS - len(tried)) * ["dense"] for ran in ranks)
    assert len({(ran.why, ran.facts.dense_s) for ran in ranks}) == 1
    assert {ran.facts.steps for ran in ranks} == {MEASURING}
    assert f"{300 * 1.1:.0f} ms a step instead of 220 ms" in ranks[0].why
    assert not any(ran.memory for ran in ranks), "dense remembers nothing"
    assert _lost(ranks) < ROUNDING
    assert len(caplog.records) == world


def test_faster_steps_keep_what_was_chosen(clock: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    clock[FIRST] = 0.01
    ranks = _run(3)
    assert all(ran.plans[MEASURING:] == (STEPS - MEASURING) * [FIRST] for ran in ranks)
    assert all(ran.memory for ran in ranks)
    assert "int8: 11 ms a step instead of 220 ms" in ranks[0].why
    [late] = {ran.late for ran in ranks}
    assert late is not None, "known from the trial, a hundred steps before the next looks tell it"
    assert f"; residual ratio {late:.2g}" in ranks[0].why
    assert _lost(ranks) < ROUNDING
    assert not caplog.records


BOTH = {FIRST: 0.01, "topk(ratio=0.01)": 0.2}


def test_one_recipe_follows_another_with_all_that_was_unsent(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one takes longer than predicted, and the other is predicted to be faster: that is tried."""
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", BOTH)
    clock |= {FIRST: 0.16, "topk": 0.16}
    ranks = _run(3, steps=STEPS + TRIAL)
    assert len({tuple(ran.plans) for ran in ranks}) == 1
    assert set(ranks[0].plans) >= {"dense", FIRST, "topk"}
    assert _lost(ranks) < 2 * ROUNDING


@pytest.mark.rest
@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_the_choice_is_the_same_ten_times_among_equals_the_milder(
    spread: float, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take longer than predicted, so both are tried. Two runs of one setting differ by the spread."""
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", {FIRST: 0.01, "fp8": 0.04})
    clock |= {FIRST: 0.165, "fp8": 0.16}
    exact, draw, chosen = Step.lasted_s, random.Random(7), set()

    def lasted_s(step: Step) -> float:
        return exact(step) * (1.0 + draw.uniform(-spread, spread))

    monkeypatch.setattr(Step, "lasted_s", lasted_s)
    for _again in range(10):
        ranks = _run(2, steps=MEASURING + 2 * (SKIPPED + COUNTED + 1))
        assert ranks[0].plans == ranks[1].plans
        assert {"fp8", FIRST} <= set(ranks[0].plans)
        chosen.add(_name(ranks[0].plans[-1]))
    assert chosen == {FIRST}


def test_dense_waits_for_a_parameter_that_is_idle_on_some_rank(clock: dict[str, float]) -> None:
    """Its memory would be lost: it neither sends nor changes while the gradient is zero."""
    clock[FIRST] = 0.3
    ranks = _run(3, idle=4)
    after = ranks[0].plans[MEASURING + TRIAL :]
    assert all(ran.plans == ranks[0].plans for ran in ranks)
    assert after == (AGAIN + 1) * ["local_every"] + (len(after) - AGAIN - 1) * ["dense"]
    assert _lost(ranks) < 2 * ROUNDING


def test_ranks_agree_on_all_facts_and_on_what_was_late(clock: dict[str, float]) -> None:
    clock[FIRST] = 0.01
    ranks = _run(3)
    assert ranks[0].facts == ranks[1].facts == ranks[2].facts
    assert {"dense", FIRST} <= set(ranks[0].facts.forecasts)
    assert len({ran.why for ran in ranks}) == 1
    assert "residual ratio" in ranks[0].why


def test_a_candidate_whose_codec_cannot_be_timed_on_some_rank_is_left_out_on_all(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = count()

    def fails_once(_exchange: object, text: str, *_: object, **_named: object) -> CodecCost:
        if text == _fixed(FIRST).text and next(calls) == 0:
            raise MemoryError("no room")
        return CodecCost(Line(1e-5, 0.0), Line(0.0, 0.0))

    monkeypatch.setattr("gradwire.control.auto.codec_cost", fails_once)
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", BOTH)
    clock["topk"] = 0.01
    ranks = _run(2, steps=MEASURING + 1)
    assert all(FIRST not in ran.facts.forecasts for ran in ranks)
    assert all("topk(ratio=0.01)" in ran.facts.forecasts for ran in ranks)
    assert "could not be timed" in caplog.messages[0]


def test_a_candidate_that_cannot_be_built_is_not_considered(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", {"topk(size=3)": 0.0, FIRST: 0.01})
    clock[FIRST] = 0.01
    ranks = _run(2, steps=MEASURING + 1)
    assert [ran.plans[-1] for ran in ranks] == [FIRST, FIRST]
    assert "recipe 'topk' has no option 'size'" in caplog.messages[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_step_sends_what_is_unsent_in_16_bits_too(dtype: torch.dtype) -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, "auto", dtype=dtype)
        rig.reducer.install(recipe("int4").build())
        for step in range(3):
            rig.step(gradients(comm.rank, step, dtype))
        rig.reducer.follow(dense())
        plans = [rig.step(gradients(comm.rank, step, dtype)).step.recipe for step in range(3, 6)]
        assert not rig.memory
        return plans

    assert run_ranks(2, rank) == [["local_every(interval=1)", "dense", "dense"]] * 2


@pytest.mark.parametrize(
    "running",
    [on_trial("int4", COMPARISON, auto), flushing(dense())],
    ids=lambda c: c.text,
)
def test_a_checkpoint_goes_on_with_what_ran_watched_and_without_a_trial(running: Composition) -> None:
    def rank(comm: Comm) -> tuple[str, bool, bool]:
        rig, again = Rig(comm, "auto"), Rig(comm, "auto")
        rig.reducer.install(replace(_fixed("int4"), text="int4"))
        rig.step(gradients(comm.rank, 0))
        rig.reducer.install(running)
        saved = state.save(rig.reducer)
        state.load(again.reducer, saved)
        same = all(torch.equal(again.memory[name], each) for name, each in rig.memory.items())
        assert any(each.any() for each in rig.memory.values())
        main = again.reducer.layout.main
        return main.text, main.watch is not None and not main.watch.ends, same

    assert run_ranks(1, rank) == [(running.text, True, True)]


def test_what_was_chosen_gives_way_to_dense_where_training_suffers() -> None:
    watch = watched(_fixed("int4"), lambda: _fixed("auto"), 0.3).watch
    assert watch is not None
    judge = watch.judge(Watched(2, (10,)))
    assert judge(StepObservation(7, 0.1, 0.0)) is None
    back = judge(StepObservation(8, 0.1, 0.0, unhealthy="the loss has risen from 1 to 2"))
    assert back is not None
    assert (back.text, back.watch) == ("dense", None)
    assert back.why == "step 8: the loss has risen from 1 to 2 under int4"
