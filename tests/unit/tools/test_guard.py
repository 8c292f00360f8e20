"""Replicas that are not equal are noticed in the step that looks, and named."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, ThreadComm, run_ranks
from gradwire.comm.checksums import CheckedComm
from gradwire.control.controller import controller_for
from gradwire.errors import RanksDisagree
from gradwire.placement import host
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.status_vote import RankReport, Votes
from gradwire.step.step import Step
from gradwire.tools.guard import Guard, check_guard
from tests.support.damage import Damage, DamagingComm
from tests.support.rig import REVERSED, Rig, gradients

RECIPES = ("dense", "topk(ratio=0.1)", "covap", "auto")


def _parameters() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {"first": torch.randn(5, 3), "half": torch.randn(4).bfloat16(), "turned": torch.randn(3, 2).T}


def _raised(
    recipe: str, world: int, every: int, change: Callable[[dict[str, Tensor], int], object], steps: int = 8
) -> list[str]:
    """What each rank raises first, after the step; ranks `change` their parameters before step 3."""
    held = [_parameters() for _ in range(world)]

    def rank(comm: Comm) -> str:
        mine = held[comm.rank]
        rig = Rig(comm, recipe, observers=[Guard(lambda: mine, every)])
        for step in range(steps):
            if step == 3:
                change(mine, comm.rank)
            before = rig.memory
            outcome = rig.step(gradients(comm.rank, step))
            if outcome.error is not None:
                assert isinstance(outcome.error, RanksDisagree)
                assert all(torch.equal(memory, before[name]) for name, memory in rig.memory.items())
                assert rig.reducer.step == step
                return f"{step}: {outcome.error}"
        return ""

    return run_ranks(world, rank)


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_replicas_pass_and_an_adaptive_recipe_decides_all_the_same(recipe: str) -> None:
    assert _raised(recipe, 2, 1, lambda _held, _rank: None) == ["", ""]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("every", "noticed"), [(1, 3), (2, 4), (5, 5)])
def test_one_bit_on_one_rank_is_noticed_on_all_when_it_is_due(recipe: str, every: int, noticed: int) -> None:
    def change(held: dict[str, Tensor], rank: int) -> None:
        if rank == 1:
            held["first"].view(torch.int32)[2, 1] ^= 1

    for said in _raised(recipe, 3, every, change):
        assert said.startswith(f"{noticed}: parameters differ between ranks before step {noticed}: ")
        assert "'first' on rank 1 (" in said


def test_a_checksum_is_not_taken_for_something_measured() -> None:
    def rank(comm: Comm) -> int:
        rig = Rig(comm, "covap", observers=[Guard(_parameters, 1)])
        for step in range(8):
            assert rig.step(gradients(comm.rank, step)).step.committed
        assert rig.reducer.facts is not None, "decided by now"
        return len(rig.reducer.facts.collectives_s)

    assert run_ranks(2, rank) == [len(REVERSED)] * 2, "the time of each bucket's collective, and no more"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ahead", [1, 2])
def test_ranks_at_different_steps_hear_so_whether_the_guard_is_due_or_not(recipe: str, ahead: int) -> None:
    def rank(comm: Comm) -> str:
        rig = Rig(comm, recipe, observers=[Guard(_parameters, 2)])
        rig.reducer.restore(rig.reducer.prepared(rig.reducer.layout, 4 + ahead * comm.rank))
        return str(rig.step(gradients(comm.rank, 0)).error)

    assert all(said.startswith("plan or step differ between ranks") for said in run_ranks(2, rank))


def test_several_parameters_and_ranks_are_named() -> None:
    def change(held: dict[str, Tensor], rank: int) -> None:
        held["half"][0] += rank % 2
        held["turned"][1, 0] += rank == 4

    for said in _raised("dense", 5, 1, change):
        assert re.search(r"'half' on rank 1, 3, 'turned' on rank 4 \(", said)


def test_a_parameter_that_took_the_place_of_another_is_looked_at() -> None:
    def change(held: dict[str, Tensor], rank: int) -> None:
        held["half"] = held["half"].clone() + rank
        held["new"] = torch.zeros(2)

    for said in _raised("dense", 2, 1, change):
        assert "'half' on rank 1 (" in said
        assert "'new'" not in said


def test_ranks_that_hold_different_parameters_hear_so() -> None:
    def change(held: dict[str, Tensor], rank: int) -> None:
        if rank == 1:
            held["new"] = torch.zeros(2)

    for said in _raised("topk(ratio=0.1)", 2, 1, change):
        assert said.startswith("3: ranks disagree on the parameters that guard_every compares: rank 0: 3: ")
        assert "rank 1: 4: first, half, turned, new" in said


@pytest.mark.parametrize("world", [2, 3])
def test_a_flipped_bit_in_what_names_the_parameters_misleads_no_rank(world: int) -> None:
    """The checksums of 300 parameters are 2,400 bytes: as one message they would not travel twice."""

    def said(comm: ThreadComm, damage: Damage) -> str:
        held = {str(number): torch.tensor([float(number)]) for number in range(300)}
        held["200"] += comm.rank == 1
        checked = CheckedComm(DamagingComm(comm, damage if comm.rank == 1 else Damage()))
        step = Step(0, "dense")
        Guard(lambda: held, 1).before(
            step, ReducerEnvironment(host(checked, print), controller_for=controller_for)
        )
        rows = (RankReport(True, False, 0, facts=(float(rank), 2.0)) for rank in range(world))
        return str(step.compare(Votes(tuple(rows))))

    nothing = Damage()
    run_ranks(world, lambda comm: said(comm, nothing))
    assert nothing.sizes
    for message in range(len(nothing.sizes)):
        heard = run_ranks(world, lambda comm, message=message: said(comm, Damage(message, (100,))))
        assert len(set(heard)) == 1
        assert heard[0].startswith("parameters differ between ranks before step 0: '200' on rank 1 (")


@pytest.mark.parametrize("every", [-1, 1.5, True, "2"])
def test_what_is_no_number_of_steps_is_refused(every: object) -> None:
    with pytest.raises(ValueError, match=r"guard_every=.* is not a number of steps"):
        check_guard(every, is_replicated=True)  # type: ignore[arg-type]


def test_shards_have_no_replicas_to_compare() -> None:
    check_guard(0, is_replicated=False)
    with pytest.raises(ValueError, match="these ranks hold shards"):
        check_guard(3, is_replicated=False)
