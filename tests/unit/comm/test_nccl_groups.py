"""A communicator keeps the algorithm that the variable named when it was first used."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from gradwire.comm import Metered, Round, ThreadComm, run_ranks
from gradwire.comm.base import DONE, Algorithm, Pending
from gradwire.comm.nccl_groups import NCCL_ALGO, Switched, by_algorithm
from tests.unit.comm.verbs import CALLS, Call


class Lazy:
    """Reads the variable at its first all-reduce, as NCCL does, and notes every one."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.algorithm: str | None = None
        self.sizes: list[int] = []

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """A communicator of NCCL knows its own algorithm only."""
        assert algorithm == "library"
        self.algorithm = self.algorithm or os.environ.get(NCCL_ALGO)
        self.sizes.append(tensor.numel())
        return DONE


@pytest.mark.parametrize("before", [None, "NVLS"])
def test_each_is_set_up_under_its_name_and_the_variable_is_restored(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NCCL_ALGO, raising=False)
    if before is not None:
        monkeypatch.setenv(NCCL_ALGO, before)
    made = by_algorithm(Lazy, torch.empty(0))
    assert {name: comm.algorithm for name, comm in made.items()} == {"ring": "RING", "tree": "TREE"}
    assert os.environ.get(NCCL_ALGO) == before


def test_the_variable_is_restored_when_a_group_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NCCL_ALGO, raising=False)

    def refuse() -> Lazy:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        by_algorithm(refuse, torch.empty(0))
    assert NCCL_ALGO not in os.environ


def test_all_reduces_go_where_their_algorithm_is_and_switch_at_any_time() -> None:
    default, made = Lazy(), by_algorithm(Lazy, torch.empty(0))
    comm = Switched(default, made)
    for size, algorithm in enumerate(("ring", "tree", "library", "ring"), start=10):
        comm.all_reduce(torch.zeros(size), algorithm).wait()
    assert made["ring"].sizes == [1, 10, 13]
    assert made["tree"].sizes == [1, 11]
    assert default.sizes == [12]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_verbs_pass_through_unchanged(call: Call) -> None:
    # A star has no communicator of its own here: the default's hops.
    results = run_ranks(3, lambda comm: call.issue(Switched(comm, {"ring": comm, "tree": comm})))
    for rank, result in enumerate(results):
        assert torch.equal(result, call.expected(rank, 3))


def test_the_round_names_the_algorithm_whoever_carries_it() -> None:
    def body(comm: ThreadComm) -> list[Round]:
        metered = Metered(Switched(comm, {"tree": comm}))
        metered.all_reduce(torch.zeros(4), "tree").wait()
        return metered.rounds

    assert run_ranks(2, body) == [[Round("all_reduce", 4, torch.float32, algorithm="tree")]] * 2
