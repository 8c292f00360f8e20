"""Ranks as threads: the verbs, and what misuse raises."""

from __future__ import annotations

import time

import pytest
import torch

from gradwire.comm import ThreadComm, run_ranks
from gradwire.errors import RanksDisagree
from tests.support.looped import looped
from tests.support.verbs import CALLS, Call

WORLDS = (1, 2, 3, 4, 5, 7)


@looped("world", WORLDS)
@looped("call", CALLS)
def test_verb(call: Call, world: int) -> None:
    for rank, result in enumerate(run_ranks(world, call.issue)):
        assert torch.equal(result, call.expected(rank, world))


@pytest.mark.parametrize("world", WORLDS)
def test_results_are_private_to_each_rank(world: int) -> None:
    def body(comm: ThreadComm) -> torch.Tensor:
        tensor = torch.ones(3)
        comm.all_reduce(tensor).wait()
        return tensor.add_(comm.rank)

    for rank, result in enumerate(run_ranks(world, body)):
        assert result.tolist() == [world + rank] * 3


def test_sum_is_in_rank_order() -> None:
    # 1 + 1e8 rounds to 1e8 in float32, so each order of addition has a result of its own.
    terms = torch.tensor([1e8, -1e8, 1.0])

    def body(comm: ThreadComm) -> float:
        tensor = terms[comm.rank].clone().view(1)
        comm.all_reduce(tensor).wait()
        return tensor.item()

    assert run_ranks(3, body) == [1.0] * 3


def test_no_elements_are_a_round_too() -> None:
    def body(comm: ThreadComm) -> int:
        comm.all_reduce(torch.zeros(0)).wait()
        comm.all_gather(torch.zeros(comm.world, 0), torch.zeros(0)).wait()
        return comm.rank

    assert run_ranks(3, body) == [0, 1, 2]


def issue_mismatched(comm: ThreadComm, what: str) -> None:
    odd = comm.rank == 1
    if what == "verb":
        tensor = torch.zeros(4)
        comm.broadcast(tensor, 0) if odd else comm.all_reduce(tensor)
    elif what == "size":
        comm.all_reduce(torch.zeros(5 if odd else 4))
    elif what == "shape":
        comm.all_reduce(torch.zeros((2, 2) if odd else (4,)))
    elif what == "dtype":
        comm.all_reduce(torch.zeros(4, dtype=torch.float64 if odd else torch.float32))
    elif what == "root":
        comm.broadcast(torch.zeros(4), 1 if odd else 0)
    elif what == "distance":
        comm.shift(torch.zeros(4), torch.zeros(4), 2 if odd else 1)


@looped("world", [2, 3, 7])
@looped("what", ["verb", "size", "shape", "dtype", "root", "distance"])
def test_mismatch_raises_on_all_ranks_and_shows_what_each_wanted(what: str, world: int) -> None:
    raised: list[str] = []

    def body(comm: ThreadComm) -> None:
        try:
            issue_mismatched(comm, what)
        except RanksDisagree as error:
            raised.append(str(error))
            raise

    with pytest.raises(RanksDisagree, match="ranks issued different collectives"):
        run_ranks(world, body)
    assert len(raised) == world
    assert all("different collectives" in text for text in raised)


def test_rank_that_raises_frees_the_others_and_its_error_wins() -> None:
    def body(comm: ThreadComm) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("a rank of its own mind")
        comm.all_reduce(torch.zeros(1)).wait()

    started = time.perf_counter()
    with pytest.raises(ZeroDivisionError, match="of its own mind"):
        run_ranks(3, body)
    assert time.perf_counter() - started < 5


def test_rank_that_returns_early_frees_the_others() -> None:
    def body(comm: ThreadComm) -> None:
        for _ in range(1 if comm.rank == 0 else 2):
            comm.all_reduce(torch.zeros(1)).wait()

    started = time.perf_counter()
    with pytest.raises(RanksDisagree, match="stopped issuing collectives"):
        run_ranks(3, body)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_ranks_that_return_after_the_last_round_disturb_nobody_on_the_way_out(rounds: int) -> None:
    def body(comm: ThreadComm) -> float:
        tensor = torch.ones(1)
        for _ in range(rounds):
            comm.all_reduce(tensor).wait()
        return tensor.item()

    for _ in range(50):
        assert run_ranks(5, body) == 5 * [5.0**rounds]


def test_ranks_that_wait_for_each_other_in_different_ways_are_told_at_once() -> None:
    def body(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.peers.receive(torch.zeros(1), 1).wait()
        else:
            comm.all_reduce(torch.zeros(1)).wait()

    started = time.perf_counter()
    with pytest.raises(RanksDisagree, match=r"a message that no rank sends|stopped issuing"):
        run_ranks(3, body)
    assert time.perf_counter() - started < 5


def test_what_has_failed_once_does_not_succeed_for_others_later() -> None:
    seen: dict[int, list[str]] = {0: [], 1: []}

    def body(comm: ThreadComm) -> None:
        # They wait for each other in different ways; rank 1 goes on, as if nothing had been.
        try:
            if comm.rank == 0:
                comm.peers.receive(torch.zeros(1), 1).wait()
                comm.all_reduce(torch.zeros(1)).wait()
            else:
                comm.all_reduce(torch.zeros(1)).wait()
        except RanksDisagree:
            seen[comm.rank].append("refused")
        if comm.rank == 1:
            comm.peers.send(torch.zeros(1), 0)
        try:
            comm.all_reduce(torch.zeros(1)).wait()
        except RanksDisagree:
            seen[comm.rank].append("refused again")

    run_ranks(2, body)
    assert seen == {0: ["refused", "refused again"], 1: ["refused", "refused again"]}


def test_one_rank_runs_at_a_time_until_it_waits() -> None:
    said: list[int] = []

    def body(comm: ThreadComm) -> None:
        for _ in range(2):
            for _ in range(3):
                said.append(comm.rank)
                time.sleep(0.001)  # nobody else uses the pause
            comm.all_reduce(torch.zeros(1)).wait()

    run_ranks(3, body)
    assert said == [0] * 3 + [1] * 3 + [2] * 6 + [0] * 3 + [1] * 3


def test_many_rounds_in_a_row_do_not_mix() -> None:
    def body(comm: ThreadComm) -> list[float]:
        sums = []
        for number in range(200):
            tensor = torch.full((1,), float(number + comm.rank))
            comm.all_reduce(tensor).wait()
            sums.append(tensor.item())
        return sums

    for sums in run_ranks(4, body):
        assert sums == [4.0 * number + 6.0 for number in range(200)]


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 0, 1), (2,))])
def test_a_part_of_the_ranks_is_a_world_of_its_own(groups: tuple[tuple[int, ...], ...]) -> None:
    def body(comm: ThreadComm) -> tuple[int, int, float, float]:
        part, mine, everything = comm.split(groups), torch.ones(1) * comm.rank, torch.ones(1) * comm.rank
        for _ in range(1 + part.world):  # groups need not be in step with each other
            summed = mine.clone()
            part.all_reduce(summed).wait()
        comm.all_reduce(everything).wait()
        return part.rank, part.world, float(summed), float(everything)

    for rank, found in enumerate(run_ranks(4, body)):
        [mine] = [group for group in groups if rank in group]
        assert found == (mine.index(rank), len(mine), sum(mine), 6)


def test_a_part_that_waits_for_a_rank_that_never_comes_raises() -> None:
    def body(comm: ThreadComm) -> None:
        part = comm.split([(0, 1), (2, 3)])
        if comm.rank != 3:
            part.all_reduce(torch.ones(1)).wait()

    with pytest.raises(RanksDisagree):
        run_ranks(4, body)
