"""States of every format that is still read, as they were when they were written."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from tests.support.rig import Rig

SHAPES = {"weight": (9, 7), "bias": (7,)}
RECIPES = ("dgc(ratio=0.1, warmup_steps=0)", "powersgd(rank=1, warmup_steps=0)")
"""A plane beside what is unsent, and a factor that an exchange keeps."""


def rig(comm: Comm, recipe: str) -> Rig:
    return Rig(comm, recipe, shapes=SHAPES, policy=lambda _spec: None)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {
        name: torch.randn(torch.Size(shape).numel(), generator=generator) for name, shape in SHAPES.items()
    }


def trained(each: Rig, rank: int, steps: range) -> list[Tensor]:
    """The means of some steps."""
    outcomes = [each.step(gradients(rank, step), [["bias", "weight"]]) for step in steps]
    assert all(outcome.step.committed for outcome in outcomes)
    return [outcome.flat() for outcome in outcomes]


@cache
def golden(version: int) -> dict[str, list[dict[str, Any]]]:
    """By recipe, the states of two ranks after three steps."""
    path = Path(__file__).parent / "states" / f"v{version}.pt"
    found: dict[str, list[dict[str, Any]]] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("keyed", [False, True])
def test_a_state_of_format_5_goes_on_where_its_run_was(recipe: str, keyed: bool) -> None:
    states = golden(5)[recipe]
    assert [each["format"] for each in states] == [5, 5]

    def rank(comm: Comm) -> None:
        through, resumed = rig(comm, recipe), rig(comm, recipe)
        trained(through, comm.rank, range(3))
        mine = states[comm.rank]
        state.load(resumed.reducer, state.keyed(mine) if keyed else mine)
        assert resumed.reducer.step == 3
        for name, memory in mine["memory"].items():
            assert torch.equal(resumed.memory[name], memory.view(-1))
        # Its numbers may be those of another machine, which adds products in another order. Relative to the
        # largest, 2^-20 is sixteen times float32's resolution. PowerSGD's sums have up to 61 products, and
        # one of n is off by n roundings at most: less than 2^6 · 2^-24.
        bound = 2.0**-18 if recipe.startswith("powersgd") else 2.0**-20
        found, expected = (trained(each, comm.rank, range(3, 5)) for each in (resumed, through))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= bound * other.abs().max()

    run_ranks(2, rank)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_of_format_5_is_the_mean_in_another_world(recipe: str) -> None:
    states = golden(5)[recipe]

    def rank(comm: Comm) -> None:
        again = rig(comm, recipe)
        state.load(again.reducer, states)
        for name, memory in again.memory.items():
            assert torch.equal(
                memory, torch.stack([each["memory"][name].view(-1) for each in states]).mean(0)
            )

    run_ranks(3, rank)
