"""The self-check of a transport: what is sound passes, and each kind of fault is found, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gradwire import recipes
from gradwire.comm import Comm, Pending, Round, ThreadComm, run_ranks
from gradwire.tools.crosscheck import CLOSE, CPU, Case, Compared, crosscheck, recipe_cases, verb_cases

Spoil = Callable[[Round, Tensor, int], None]


class Spoiled(Comm):
    """A transport in which something goes wrong after each collective."""

    def __init__(self, comm: Comm, spoil: Spoil) -> None:
        self._comm, self._spoil = comm, spoil
        self.rank, self.world = comm.rank, comm.world

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        pending = self._comm.issue(round_, tensor, out)
        self._spoil(round_, out, self.rank)
        return pending


def checked(cases: Sequence[Case], spoil: Spoil, budget_s: float = 1000.0) -> list[Compared]:
    """On two ranks, which must agree."""

    def rank(comm: ThreadComm) -> list[Compared]:
        oracle = comm.split([[0, 1]])  # groups of their own, as ranks would be out of step on the other
        control = oracle.split([[0, 1]])
        return list(crosscheck(cases, Spoiled(comm, spoil), CPU, oracle, control, budget_s=budget_s))

    first, second = run_ranks(2, rank)
    assert first == second
    return first


def nothing(round_: Round, out: Tensor, rank: int) -> None:
    """All is well."""


def faulty(found: Sequence[Compared]) -> set[str]:
    return {each.name for each in found if each.fault}


@pytest.mark.parametrize(
    "verb",
    ["all_reduce", "broadcast", "all_gather", "all_to_all", "shift", "all_reduce/ring", "broadcast/scatter"],
)
def test_one_wrong_element_of_one_rank_is_found_in_the_verb_that_it_is_of(verb: str) -> None:
    def spoil(round_: Round, out: Tensor, rank: int) -> None:
        if round_.name == verb and rank == 1:
            out.view(-1)[-1] += 1

    cases = verb_cases()
    expected = {case.name for case in cases if case.name.split(",")[0] == verb}
    assert expected
    assert faulty(checked(cases, nothing)) == set()
    assert faulty(checked(cases, spoil)) == expected


def test_every_recipe_is_tried_but_those_that_measure_first() -> None:
    cases = list(recipe_cases(CPU))
    assert [case.name for case in cases] == list(recipes.names())
    assert {case.name for case in cases if case.call is None} == {"auto"}
    some = [case for case in cases if case.name in ("auto", "dense", "covap", "topk", "int8")]
    found = {each.name: each for each in checked(some, nothing)}
    assert faulty(list(found.values())) == set()
    assert found["auto"].said.startswith("skipped: decides")
    assert found["covap"].said == "same bits as gloo"


def test_what_the_host_reads_is_not_tried_on_a_device() -> None:
    there = {case.name: case for case in recipe_cases(torch.device("cuda", 0))}
    skipped = {name for name, case in there.items() if case.call is None}
    assert {"auto", "gcomp", "oktopk", "threshold"} <= skipped
    assert skipped.isdisjoint({"dense", "int8", "topk", "powersgd", "covap", "efsignsgd", "qsgd", "randomk"})


def test_means_that_differ_between_ranks_by_one_bit_are_found() -> None:
    def spoil(round_: Round, out: Tensor, rank: int) -> None:
        if rank == 1:
            out.view(torch.int32)[0] ^= 1

    [dense] = checked([case for case in recipe_cases(CPU) if case.name == "dense"], spoil)
    assert dense.fault == "ranks hold different means"


@pytest.mark.parametrize(
    ("share", "factor", "is_found"),
    [(1.0, 0.5, False), (1.0, 2.0, True), (0.0005, 1e3, False), (0.002, 1e3, True), (0.002, torch.nan, True)],
)
def test_a_few_elements_may_be_far_and_all_a_little(share: float, factor: float, is_found: bool) -> None:
    def result(comm: Comm, where: torch.device) -> Tensor:
        x = torch.ones(10_000)
        if isinstance(comm, Spoiled):
            x[: int(share * len(x))] += factor * CLOSE
        return x

    [close] = checked([Case("close", result)], nothing)
    assert bool(close.fault) == is_found
    [exact] = checked([Case("exact", result, exact=True)], nothing)
    assert exact.fault


def test_after_an_error_on_one_rank_nothing_more_is_tried_and_after_one_on_all_the_rest_is() -> None:
    def once(comm: Comm, where: torch.device) -> Tensor:
        x = torch.ones(3)
        comm.all_reduce(x).wait()
        return x

    cases = [Case("one sum", once), *verb_cases()[1:3]]
    for failing, stops in (((1,), True), ((0, 1), False)):

        def spoil(round_: Round, out: Tensor, rank: int, failing: tuple[int, ...] = failing) -> None:
            if round_.verb == "all_reduce" and rank in failing:
                raise RuntimeError("a broken cable")

        first, *rest = checked(cases, spoil)
        assert first.fault == f"raised an error on ranks {list(failing)}"
        assert all(bool(each.fault) == stops for each in rest)
        assert not stops or "may be out of step after one sum" in rest[0].fault


def test_the_time_is_bounded_and_what_was_not_tried_is_a_fault() -> None:
    first, *rest = checked(verb_cases(), nothing, budget_s=0.0)
    assert not first.fault
    assert {each.fault for each in rest} == {"not tried within 0 s"}
