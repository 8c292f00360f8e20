"""A watched composition: what its judge sees, and what happens when it wants another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.planning.change_detection import WINDOW
from gradwire.planning.facts import StepObservation, Watched
from gradwire.recipes import Composition, recipe
from gradwire.recipes.base import Judge, Watch
from tests.support.rig import Rig, gradients

STEPS = 9


def _composition(text: str, watch: Watch | None = None) -> Composition:
    built = recipe(text).build()
    return replace(built, watch=watch)


def _size(x: Tensor) -> Sequence[float]:
    return float(x.numel()), 1.0


def _watched(judge: Judge, **options: object) -> Composition:
    watch = Watch(lambda _watched: judge, every=3, look=_size, looks=2)
    return _composition("topk(ratio=0.1)", replace(watch, **options))  # type: ignore[arg-type]


def _observe(world: int, **options: object) -> list[list[StepObservation]]:
    def rank(comm: Comm) -> list[StepObservation]:
        seen: list[StepObservation] = []
        rig = Rig(comm, "dense")
        rig.reducer.install(_watched(lambda shown: seen.append(shown), **options))
        for step in range(STEPS):
            outcome = rig.step(gradients(comm.rank, step))
            assert outcome.error is None
        return seen

    return run_ranks(world, rank)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_judge_sees_the_same_on_all_ranks(world: int) -> None:
    seen = _observe(world)
    assert all(each == seen[0] for each in seen)
    assert [shown.step for shown in seen[0]] == list(range(STEPS))


def test_looks_are_summed_over_units_and_ranks_when_they_are_due() -> None:
    [seen, _other] = _observe(2)
    numel = 37 * 61 + 53 * 41 + 47 * 59
    assert [shown.looked is not None for shown in seen] == [step % 3 == 0 for step in range(STEPS)]
    assert seen[0].looked is not None
    elements, units = seen[0].looked
    assert elements == 2 * numel
    assert units >= 2


def test_a_step_that_is_tried_again_is_looked_at_once() -> None:
    def rank(comm: Comm) -> list[tuple[float, ...] | None]:
        seen: list[StepObservation] = []
        fails = [comm.rank == 1]

        def look(x: Tensor) -> Sequence[float]:
            if fails.pop() if fails else False:
                raise ZeroDivisionError("once")
            return _size(x)

        rig = Rig(comm, "dense")
        rig.reducer.install(_watched(lambda shown: seen.append(shown), look=look))
        assert rig.step(gradients(comm.rank, 0)).error is not None
        assert rig.step(gradients(comm.rank, 0)).error is None
        return [shown.looked for shown in seen]

    alone = _observe(2)[0][0].looked
    assert run_ranks(2, rank) == [[alone]] * 2


def test_a_judge_is_told_what_steps_took_and_their_link_once_that_is_known() -> None:
    def rank(comm: Comm) -> list[StepObservation]:
        seen: list[StepObservation] = []
        rig = Rig(comm, "dense")
        rig.reducer.install(_watched(lambda shown: seen.append(shown)))
        for step in range(WINDOW + 2):
            assert rig.step(gradients(comm.rank, step)).error is None
            known.append(rig.reducer.traffic.link == seen[-1].link)
        return seen

    known: list[bool] = []
    seen, other = run_ranks(2, rank)
    assert seen == other
    assert seen[0].previous_s == seen[0].compressed_s == 0.0
    assert all(shown.previous_s > shown.compressed_s > 0 for shown in seen[1:])
    assert [shown.link is None for shown in seen] == WINDOW * [True] + 2 * [False]
    assert all(known)


def test_a_judge_is_told_what_it_watches() -> None:
    def rank(comm: Comm) -> list[Watched]:
        told: list[Watched] = []

        def judge(watched: Watched) -> Judge:
            told.append(watched)
            return lambda _shown: None

        Rig(comm, "dense").reducer.install(_composition("topk(ratio=0.1)", Watch(judge)))
        return told

    expected = Watched(2, (47 * 59, 53 * 41, 37 * 61))
    assert run_ranks(2, rank) == [[expected], [expected]]


def test_nothing_asked_nothing_seen() -> None:
    [seen] = _observe(1, look=None, looks=0)
    assert all(shown.looked is None for shown in seen)


def test_a_step_with_nan_is_not_judged() -> None:
    def rank(comm: Comm) -> list[StepObservation]:
        seen: list[StepObservation] = []
        rig = Rig(comm, "dense")
        rig.reducer.install(_watched(lambda shown: seen.append(shown)))
        for step in range(STEPS):
            grads = gradients(comm.rank, step)
            if step == 3 and comm.rank == 1:
                grads["middle.weight"][7] = torch.nan
            assert rig.step(grads).error is None
        return seen

    seen, other = run_ranks(2, rank)
    assert seen == other
    assert [shown.step for shown in seen] == list(range(STEPS - 1))
    assert all(torch.tensor(shown.looked or [0.0]).isfinite().all() for shown in seen)


def test_another_composition_takes_over_everything_unsent() -> None:
    """What came in over all steps is what went out and what is left, across the change."""

    def rank(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
        def judge(shown: StepObservation) -> Composition | None:
            return _composition("leader_topk(ratio=0.3)") if shown.step == 4 else None

        rig = Rig(comm, "dense")
        rig.reducer.install(_watched(judge))
        given: dict[str, Tensor] = {}
        plans = []
        for step in range(STEPS):
            grads = gradients(comm.rank, step)
            outcome = rig.step(grads)
            plans.append(outcome.step.recipe.split("(")[0])
            for name in outcome.memory:
                here = grads[name].double() / 1.0 - outcome.mean[name].double()
                given[name] = given.get(name, torch.zeros_like(here)) + here
        return given, rig.memory, plans

    ranks = run_ranks(3, rank)
    assert all(plans == ["topk"] * 5 + ["leader_topk"] * 4 for _, _, plans in ranks)
    for name in ranks[0][1]:
        left = torch.stack([memory[name].double() for _, memory, _ in ranks]).mean(0)
        balance = torch.stack([given[name] for given, _, _ in ranks]).mean(0)
        # Each of 9 steps rounds compensations, sums and subtractions of numbers below 32 to half an ulp.
        assert (left - balance).abs().max() < STEPS * 4 * 32 * torch.finfo(torch.float32).eps


def test_units_that_rest_are_looked_at_as_well() -> None:
    """What is gained of a gradient is a share of all of it, not of what travels in this step."""

    def rank(comm: Comm) -> list[float]:
        energies: list[float] = []
        rig = Rig(comm, "dense")
        watch = Watch(lambda _: lambda shown: energies.extend(shown.looked or ()), 1, _size, 2)
        rig.reducer.install(_composition("covap(interval=3)", watch))
        for step in range(3):
            rig.step(gradients(comm.rank, step))
        return energies[::2]

    numel = 37 * 61 + 53 * 41 + 47 * 59
    assert run_ranks(2, rank) == [[2.0 * numel] * 3] * 2


def test_what_a_policy_sends_otherwise_is_not_looked_at() -> None:
    def rank(comm: Comm) -> int:
        looked = []

        def look(x: Tensor) -> Sequence[float]:
            looked.append(x.numel())
            return [1.0]

        watch = Watch(lambda _watched: lambda _shown: None, every=1, look=look, looks=1)
        rig = Rig(comm, "dense", policy={"middle.*": "topk(ratio=0.1)"})
        rig.reducer.install(_composition("covap(interval=3)", watch))
        rig.step(gradients(comm.rank, 0))
        return sum(looked)

    assert run_ranks(2, rank) == [37 * 61 + 61 + 1 + 47 * 59 + 59] * 2


def test_a_failing_look_is_everybodys_error() -> None:
    def rank(comm: Comm) -> str:
        def look(_x: Tensor) -> Sequence[float]:
            if comm.rank == 1:
                raise ZeroDivisionError("looked too closely")
            return 0.0, 0.0

        rig = Rig(comm, "dense")
        rig.reducer.install(_watched(lambda _shown: None, look=look))
        return type(rig.step(gradients(comm.rank, 0)).error).__name__

    assert run_ranks(2, rank) == ["PeerFailed", "ZeroDivisionError"]
