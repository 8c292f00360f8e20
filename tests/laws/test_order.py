"""Collectives match whatever the order in which gradients arrive on each rank."""

from __future__ import annotations

import itertools

import torch

from gradwire.comm import Comm, run_ranks
from gradwire.errors import GradwireError
from tests.golden.rounds import NAMES, Announcing
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, kind
from tests.support.rig import SHUFFLED, Outcome, Rig, gradients

WORLD, STEPS = 3, 2
ORDERS = tuple(itertools.permutations(range(len(SHUFFLED))))
IN_TURN = ORDERS[0]


def _outcomes(name: str, mixed: bool) -> list[list[tuple[Outcome, list[str]]]]:
    """By rank and step: what came out, and which collectives were announced in which order."""

    def rank(comm: Comm) -> list[tuple[Outcome, list[str]]]:
        rig, told = Announcing(comm, EVERY_RECIPE[name], unit_elements=1000), []
        for step in range(STEPS):
            # All six orders come up within two steps, another one on every rank.
            order = ORDERS[comm.rank + WORLD * step] if mixed else IN_TURN
            rig.announced.clear()
            outcome = rig.step(gradients(comm.rank, step), SHUFFLED, order)
            told.append((outcome, list(rig.announced)))
        return told

    return run_ranks(WORLD, rank)


@looped("name", NAMES, by=kind, few=1)
def test_the_order_of_arrival_changes_neither_collectives_nor_numbers(name: str) -> None:
    # Threads as ranks raise where two of them issue different collectives.
    expected = _outcomes(name, mixed=False)[0]
    for of_rank in _outcomes(name, mixed=True):
        for (outcome, announced), (in_turn, in_order) in zip(of_rank, expected, strict=True):
            assert outcome.step.committed, outcome.error
            assert announced == in_order
            assert torch.equal(outcome.flat(), in_turn.flat())


@looped("text", ["dense", "topk(ratio=0.1)"])
def test_a_buffer_that_never_comes_fails_the_step(text: str) -> None:
    def rank(comm: Comm) -> BaseException | None:
        rig = Rig(comm, text)
        # The second of three is missing, so that the third never has its turn.
        outcome = rig.step(gradients(comm.rank, 0), SHUFFLED, (2, 0))
        assert outcome.mean["first.bias"].isnan().all(), "no gradient passes for a mean"
        assert outcome.mean["scalar"].isnan()
        return outcome.error

    for error in run_ranks(WORLD, rank):
        assert isinstance(error, GradwireError)
        assert "never arrived" in str(error)
