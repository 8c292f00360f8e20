"""The lateness that the reducer measures, beside one that is computed from gradients and memories alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.planning.lateness import LEAST
from gradwire.recipes import Composition, recipe
from gradwire.recipes.base import Watch
from gradwire.step.status_vote import RankReport
from gradwire.unit.context import Fates
from tests.support.rig import NAMES, Rig, gradients
from tests.support.tiers import rest

STEPS = 4 * LEAST + 2
"""More than the looks of which the median is taken, of a cycle of two steps, too; a look is told a step
later."""

VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "bfloat16 memory": {"memory_dtype": torch.bfloat16},
    "committed late": {"commits": "late"},
    "nodes": {"per_node": 2},
}
HALVED = "covap(interval=2, init_value=0.5, ascend_steps=100, ascend_range=0.1)"
"""Its memory is added with a factor of a half."""
RECIPES = {
    "topk(ratio=0.1)": 1.0,
    "int4": 1.0,
    "scalecom(rate=8, beta=0.25, warmup_steps=0)": 4.0,
    HALVED: 1.0,
}
"""How much gradient a memory of 1 stands for."""
CYCLE = {HALVED: 2}


def _on_trial(text: str) -> Composition:
    """The recipe, weighed in each step."""
    return replace(recipe(text).build(), watch=Watch(lambda _: lambda _shown: None, every=1, ends=True))


def _square(values: Tensor) -> float:
    return float(values.double().square().sum())


def _told(text: str, world: int, options: dict[str, Any]) -> list[tuple[float | None, list[list[float]]]]:
    """By rank: the reducer's lateness at the end, and of each step the squares of what is fresh and
    unsent."""
    weight, per_node = RECIPES.get(text, 1.0), options.get("per_node", 1)

    def rank(comm: Comm) -> tuple[float | None, list[list[float]]]:
        rig, squares = Rig(comm, "dense", **options), []
        rig.reducer.install(_on_trial(text))
        for step in range(STEPS):
            rig.reducer.catch_up(Fates())
            memory = rig.memory
            node = range(comm.rank - comm.rank % per_node, comm.rank - comm.rank % per_node + per_node)
            own = [gradients(each, step) for each in node]
            # Each rank of a node has its part of their mean.
            fresh = sum(_square(sum(each[name] for each in own) / per_node) for name in memory) / per_node
            squares.append([fresh, sum(_square(plane) for plane in memory.values()) * weight**2])
            assert rig.step(gradients(comm.rank, step)).error is None
        rig.reducer.catch_up(Fates())
        return rig.reducer.late, squares

    return run_ranks(world, rank)


def _by_hand(ranks: Sequence[list[list[float]]], cycle: int = 1) -> float:
    """The median over the last looks; what the last step found has not been told."""
    steps = [[math.fsum(column) for column in zip(*row, strict=True)] for row in zip(*ranks, strict=True)]
    whole = [steps[begin : begin + cycle] for begin in range(0, len(steps) - cycle, cycle)]
    quotients = [math.sqrt(sum(row[1] for row in part) / sum(row[0] for row in part)) for part in whole]
    return median(quotients[-2 * -(-LEAST // cycle) :])


@pytest.mark.parametrize("variant", rest(VARIANTS, but=["flat", "nodes"]))
@pytest.mark.parametrize("text", RECIPES)
def test_lateness_is_what_gradients_and_memories_say(text: str, variant: str) -> None:
    """A fresh gradient is found by subtraction, and a verdict carries float32: ten roundings at most."""
    ranks = _told(text, 4 if variant == "nodes" else 2, VARIANTS[variant])
    expected = _by_hand([squares for _late, squares in ranks], CYCLE.get(text, 1))
    assert expected > 0.05
    for late, _squares in ranks:
        assert late == pytest.approx(expected, rel=10 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("text", ["dense", "bf16", "fp16", "gcomp"])
def test_where_nothing_is_remembered_nothing_is_late(text: str) -> None:
    assert [late for late, _ in _told(text, 2, {})] == [0.0, 0.0]


@pytest.mark.parametrize("variant", rest(VARIANTS, but=["nodes"]))
@pytest.mark.parametrize("is_on_trial", [True, False])
def test_rows_are_alike_in_length_on_all_ranks(
    variant: str, is_on_trial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only one rank notes losses, or has no gradient, and in the steps that are weighed."""
    written: dict[int, list[int]] = {}
    write = RankReport.write

    def writes(row: RankReport, table: Tensor, rank: int) -> None:
        written.setdefault(rank, []).append(row.width)
        write(row, table, rank)

    monkeypatch.setattr(RankReport, "write", writes)
    world = 4 if variant == "nodes" else 2

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "dense", **VARIANTS[variant])
        rig.reducer.install(
            _on_trial("topk(ratio=0.1)") if is_on_trial else recipe("topk(ratio=0.1)").build()
        )
        for step in range(34):
            grads = gradients(comm.rank, step)
            if comm.rank == 0:
                rig.reducer.health.note(1.0)
                grads["first.weight"].zero_()
            assert rig.step(grads).error is None

    run_ranks(world, rank)
    assert set(written) == set(range(world))
    assert all(widths == written[0] for widths in written.values())


@pytest.mark.parametrize("variant", rest(VARIANTS, but=["committed late"]))
@pytest.mark.parametrize("text", ["topk(ratio=0.1)", "covap(interval=2)"])
def test_a_step_that_is_left_out_does_not_disturb_lateness(text: str, variant: str) -> None:
    world = 4 if variant == "nodes" else 2

    def rank(comm: Comm) -> tuple[list[float | None], list[float | None]]:
        rigs, late = [Rig(comm, "dense", **VARIANTS[variant]) for _ in range(2)], []
        for rig, dropped in zip(rigs, ((), (1, 4, *range(10, STEPS))), strict=True):
            rig.reducer.install(_on_trial(text))
            for step in range(STEPS):
                if step in dropped:
                    rig.step({name: 1e4 * each for name, each in gradients(comm.rank, 90 + step).items()})
                    assert rig.reducer.catch_up(Fates(dropped=frozenset(NAMES), made=False))
                rig.step(gradients(comm.rank, step))
                rig.reducer.catch_up(Fates())
            late.append(rig.reducer.late)
        return late[0], late[1]

    for untouched, disturbed in run_ranks(world, rank):
        assert untouched is not None
        assert disturbed == untouched
