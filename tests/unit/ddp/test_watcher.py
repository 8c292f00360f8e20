"""A watched composition: what its judge sees, and what happens when it wants another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.ddp.watcher import Watcher
from gradwire.errors import TransportError
from gradwire.plan import Observed, Watched
from gradwire.recipes import Composition, recipe
from gradwire.recipes.base import Judge, Watch
from tests.unit.ddp.rig import Rig, gradients

STEPS = 9


def _composition(text: str, watch: Watch | None = None) -> Composition:
    built = recipe(text).build()
    assert isinstance(built, Composition)
    return replace(built, watch=watch)


def _size(x: Tensor) -> Sequence[float]:
    return float(x.numel()), 1.0


def _watched(judge: Judge, **options: object) -> Composition:
    watch = Watch(lambda _watched: judge, every=3, look=_size, looks=2, probes=(1, 64))
    return _composition("topk(ratio=0.1)", replace(watch, **options))  # type: ignore[arg-type]


def _observe(world: int, **options: object) -> list[list[Observed]]:
    def rank(comm: Comm) -> list[Observed]:
        seen: list[Observed] = []
        rig = Rig(comm, "dense")
        rig.engine.install(_watched(lambda shown: seen.append(shown), **options))
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
        seen: list[Observed] = []
        fails = [comm.rank == 1]

        def look(x: Tensor) -> Sequence[float]:
            if fails.pop() if fails else False:
                raise ZeroDivisionError("once")
            return _size(x)

        rig = Rig(comm, "dense")
        rig.engine.install(_watched(lambda shown: seen.append(shown), look=look))
        assert rig.step(gradients(comm.rank, 0)).error is not None
        assert rig.step(gradients(comm.rank, 0)).error is None
        return [shown.looked for shown in seen]

    alone = _observe(2)[0][0].looked
    assert run_ranks(2, rank) == [[alone]] * 2


def test_probes_follow_the_steps_that_look() -> None:
    [seen, _other] = _observe(2)
    assert [shown.probed_s is not None for shown in seen] == [step % 3 == 1 for step in range(STEPS)]
    assert seen[1].probed_s is not None
    assert len(seen[1].probed_s) == 2
    assert min(seen[1].probed_s) > 0
    assert seen[0].previous_s == seen[0].compressed_s == 0.0
    assert all(shown.previous_s > shown.compressed_s > 0 for shown in seen[1:])


def test_while_steps_take_as_long_as_they_did_the_link_is_probed_seldom() -> None:
    def rank(comm: Comm) -> list[int]:
        watch = Watch(lambda _watched: lambda _shown: None, every=2, probes=(1,), calm=4)
        watcher, probed = Watcher(watch, comm, [10]), []
        for step in range(80):
            row = torch.tensor(watcher.row(step), dtype=torch.float64)
            rows = row.new_empty(comm.world, row.numel())
            comm.all_gather(rows, row).wait()
            probed += [step - 1] if row.numel() > 2 else []
            # The other rank's own steps vary, but never are the slowest.
            took_s = (1.0 if step < 40 else 1.3) if comm.rank == 0 else 0.5 + 0.4 * (step // 5 % 2)
            watcher.observe(step, rows.tolist(), (took_s, 0.0), True)
            watcher.probe(step)
        return probed

    probed, theirs = run_ranks(2, rank)
    assert probed == theirs
    assert {2, 4, 6} <= set(probed), "to begin with"
    assert [step for step in probed if 10 < step < 40] == [16, 24, 32]
    assert {44, 46, 48} <= set(probed), "steps take longer"
    assert [step for step in probed if step > 50] == [56, 64, 72]


def test_a_judge_is_told_what_it_watches() -> None:
    def rank(comm: Comm) -> list[Watched]:
        told: list[Watched] = []

        def judge(watched: Watched) -> Judge:
            told.append(watched)
            return lambda _shown: None

        Rig(comm, "dense").engine.install(_composition("topk(ratio=0.1)", Watch(judge)))
        return told

    expected = Watched(2, (47 * 59, 53 * 41, 37 * 61))
    assert run_ranks(2, rank) == [[expected], [expected]]


def test_nothing_asked_nothing_seen() -> None:
    [seen] = _observe(1, look=None, looks=0, probes=())
    assert all(shown.looked is None and shown.probed_s is None for shown in seen)


def test_a_step_with_nan_is_not_judged_but_the_probe_goes_on() -> None:
    def rank(comm: Comm) -> list[Observed]:
        seen: list[Observed] = []
        rig = Rig(comm, "dense")
        rig.engine.install(_watched(lambda shown: seen.append(shown)))
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
        def judge(shown: Observed) -> Composition | None:
            return _composition("leader_topk(ratio=0.3)") if shown.step == 4 else None

        rig = Rig(comm, "dense")
        rig.engine.install(_watched(judge))
        given: dict[str, Tensor] = {}
        plans = []
        for step in range(STEPS):
            grads = gradients(comm.rank, step)
            outcome = rig.step(grads)
            plans.append(outcome.step.plan.split("(")[0])
            for name in outcome.memory:
                here = grads[name].double() / 1.0 - outcome.mean[name].double()
                given[name] = given.get(name, torch.zeros_like(here)) + here
        return given, rig.memory, plans

    ranks = run_ranks(3, rank)
    assert all(plans == ["topk"] * 5 + ["leader_topk"] * 4 for _, _, plans in ranks)
    for name in ranks[0][1]:
        left = torch.stack([memory[name].double() for _, memory, _ in ranks]).mean(0)
        balance = torch.stack([given[name] for given, _, _ in ranks]).mean(0)
        # Each of 9 steps rounds folds, sums and subtractions of numbers below 32 to half an ulp.
        assert (left - balance).abs().max() < STEPS * 4 * 32 * torch.finfo(torch.float32).eps


def test_units_that_rest_are_looked_at_as_well() -> None:
    """What is gained of a gradient is a share of all of it, not of what travels in this step."""

    def rank(comm: Comm) -> list[float]:
        energies: list[float] = []
        rig = Rig(comm, "dense")
        watch = Watch(lambda _: lambda shown: energies.extend(shown.looked or ()), 1, _size, 2)
        rig.engine.install(_composition("covap(interval=3)", watch))
        for step in range(3):
            rig.step(gradients(comm.rank, step))
        return energies[::2]

    numel = 37 * 61 + 53 * 41 + 47 * 59
    assert run_ranks(2, rank) == [[2.0 * numel] * 3] * 2


def test_a_transport_that_breaks_in_a_probe_spares_the_step_before_and_ends_the_next() -> None:
    def rank(comm: Comm) -> tuple[bool, str]:
        rig = Rig(comm, "dense")
        rig.engine.install(_watched(lambda _shown: None))
        watcher = rig.engine._watcher
        assert watcher is not None

        class Broken:
            def all_reduce(self, _payload: Tensor) -> None:
                raise TransportError("cable cut")

        watcher._comm = Broken()  # type: ignore[assignment]
        first = rig.step(gradients(comm.rank, 0))
        return bool(first.flat().isfinite().all()), type(rig.step(gradients(comm.rank, 1)).error).__name__

    assert run_ranks(2, rank) == [(True, "TransportError")] * 2


def test_a_failing_look_is_everybodys_error() -> None:
    def rank(comm: Comm) -> str:
        def look(_x: Tensor) -> Sequence[float]:
            if comm.rank == 1:
                raise ZeroDivisionError("looked too closely")
            return 0.0, 0.0

        rig = Rig(comm, "dense")
        rig.engine.install(_watched(lambda _shown: None, look=look))
        return type(rig.step(gradients(comm.rank, 0)).error).__name__

    assert run_ranks(2, rank) == ["PeerFailed", "ZeroDivisionError"]
