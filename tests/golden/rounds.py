"""The rounds that every recipe announces in its first steps, on three threads, in units as it cuts them.

They are a golden file (`test_shape.py`). `Announcing` is the only place that reads them off a reducer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from gradwire.comm import Comm, Round, run_ranks
from gradwire.step.step import InFlight
from tests.golden.steps import BY_THE_CLOCK, STEPS
from tests.support.recipes import EVERY_RECIPE
from tests.support.rig import Rig, gradients

WORLD = 3

NAMES = [name for name in EVERY_RECIPE if name not in BY_THE_CLOCK]


class Announcing(Rig):
    """A rig that notes what the exchanges of the current step announce."""

    def __init__(self, comm: Comm, text: str, *, unit_elements: int | None = None) -> None:
        super().__init__(comm, text, unit_elements=unit_elements)
        self.announced: list[str] = []
        unless_broken = self.reducer.unless_broken

        def noted(do: Callable[..., None], *arguments: Any) -> None:
            for each in arguments:
                if isinstance(each, InFlight) and each.decode is None:  # or it is decoded
                    self.announced.append(f"{each.plan.label}: {spelled(each.agreed.rounds)}")
            unless_broken(do, *arguments)

        self.reducer.unless_broken = noted  # type: ignore[method-assign]


def spelled(rounds: tuple[Round, ...]) -> str:
    """Rounds in a few words each; equal neighbours are counted.

    >>> import torch
    >>> spelled((Round("all_gather", 3, torch.uint8), Round("shift", 8, torch.uint8, at_most=True)) * 1)
    'all_gather 3 uint8, shift at most 8 uint8'
    """
    words = []
    for each, run in itertools.groupby(rounds):
        times = len(list(run))
        extent = "at most " if each.at_most else ""
        details = [f" by {each.by}"] * (each.by != 1) + [f" from {each.src}"] * (each.src != 0)
        details += [f" {each.algorithm}"] * (each.algorithm != "library")
        dtype = str(each.dtype).removeprefix("torch.")
        word = f"{each.verb} {extent}{each.numel} {dtype}{''.join(details)}"
        words.append(word if times == 1 else f"{times} x {word}")
    return ", ".join(words)


def announced(name: str) -> list[str]:
    """Rounds step by step; rank 0 announces what all do."""

    def rank(comm: Comm) -> list[str]:
        rig, told = Announcing(comm, EVERY_RECIPE[name]), []
        for step in range(STEPS):
            rig.announced.clear()
            outcome = rig.step(gradients(comm.rank, step))
            assert outcome.step.committed, outcome.error
            small = sum(each.buffer.numel() for each in outcome.step.flight.small)
            told.append("; ".join([*rig.announced, f"small: {small}"]))
        return told

    return run_ranks(WORLD, rank)[0]
