"""The reducer's two comms: gradients over one, and all that ranks agree on over the other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.errors import PeerFailed
from gradwire.measure.metered import MeteredComm
from tests.support.rig import SHUFFLED, Rig, gradients

STEPS = 3


@pytest.mark.parametrize("text", ["dense", "fp16", "topk(ratio=0.1)", "covap(interval=2)", "auto"])
def test_the_status_vote_travels_over_the_control_comm_and_gradients_do_not(text: str) -> None:
    def rank(comm: Comm) -> None:
        data, control = MeteredComm(comm), MeteredComm(comm)
        together, apart = Rig(comm, text), Rig(data, text, control=control)
        for step in range(STEPS):
            expected = together.step(gradients(comm.rank, step))
            before = len(data.rounds)
            outcome = apart.step(gradients(comm.rank, step))
            assert outcome.step.committed
            assert outcome.mean.keys() == expected.mean.keys()
            assert all(torch.equal(outcome.mean[name], expected.mean[name]) for name in expected.mean)
            assert outcome.step.sent.metered_bytes == outcome.step.sent.predicted_bytes
            assert len(data.rounds) > before
        assert [each.verb for each in control.rounds] == ["all_reduce"] * STEPS
        assert all(each.numel % comm.world == 0 for each in control.rounds)

    run_ranks(3, rank)


def test_a_step_without_small_gradients_has_a_status_vote_over_the_control_comm() -> None:
    shapes = {"weight": (200, 300)}

    def rank(comm: Comm) -> int:
        control = MeteredComm(comm)
        rig = Rig(comm, "dense", shapes=shapes, control=control)
        grads = {"weight": torch.full((60_000,), float(comm.rank))}
        assert rig.step(grads, (("weight",),)).step.committed
        return len(control.rounds)

    assert run_ranks(2, rank) == [1, 1]


def test_a_failure_is_told_over_the_control_comm() -> None:
    full = OSError("no room")

    def compensate(*_: object) -> None:
        raise full

    def rank(comm: Comm) -> BaseException | None:
        rig = Rig(comm, "topk(ratio=0.1)", control=MeteredComm(comm))
        if comm.rank == 0:
            rig.reducer.layout.flat_buffers[0].compensate = compensate  # type: ignore[assignment,method-assign]
        return rig.step(gradients(comm.rank, 0)).error

    own, *others = run_ranks(3, rank)
    assert own is full
    assert all(isinstance(error, PeerFailed) for error in others)


def test_a_mean_without_room_fails_its_step_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    full, real, without = MemoryError("no room"), torch.empty_like, set[int]()

    def empty_like(like: torch.Tensor, **options: Any) -> torch.Tensor:
        if threading.get_ident() in without:
            raise full
        return real(like, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)

    def rank(comm: Comm) -> list[BaseException | None]:
        rig = Rig(comm, "topk(ratio=0.1)")
        found = []
        for step in range(3):
            # A unit of several buckets needs room for its mean.
            change = without.add if (comm.rank, step) == (0, 1) else without.discard
            change(threading.get_ident())
            found.append(rig.step(gradients(comm.rank, step), SHUFFLED).error)
        return found

    own, other = run_ranks(2, rank)
    assert own == [None, full, None]
    assert [type(each) for each in other] == [type(None), PeerFailed, type(None)]


SHARDS = ((0, 2), (1, 3))
"""Of four ranks: those with the first shard of everything, and those with the second."""


@pytest.mark.parametrize("spot", ["middle.weight", "scalar", "last.bias"])
@pytest.mark.parametrize("text", ["dense", "fp16", "int8", "topk(ratio=0.1)", "auto"])
def test_what_is_not_finite_in_one_shard_stops_the_step_in_all(text: str, spot: str) -> None:
    def rank(comm: Comm) -> list[tuple[bool, int]]:
        rig = Rig(comm.split(SHARDS), text, control=comm)
        found = []
        for step, bad in enumerate((0.0, torch.nan, 0.0)):
            grads = gradients(comm.rank, step)
            if comm.rank == 3:
                grads[spot][0] += bad
            outcome = rig.step(grads)
            assert outcome.error is None
            found.append((outcome.step.committed, rig.reducer.step))
        return found

    assert run_ranks(4, rank) == [[(True, 1), (False, 1), (True, 2)]] * 4


def test_a_sum_that_overflows_in_one_shard_stops_the_step_in_all() -> None:
    def rank(comm: Comm) -> bool:
        grads = gradients(comm.rank, 0)
        if comm.rank % 2 == 1:
            grads["middle.weight"].fill_(1e30)  # finite, and beyond what travels in 16 bits
        return Rig(comm.split(SHARDS), "fp16", control=comm).step(grads).step.committed

    assert run_ranks(4, rank) == [False] * 4


@pytest.mark.parametrize("text", ["dense", "topk(ratio=0.1)"])
def test_shards_have_means_of_their_own(text: str) -> None:
    def rank(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        shard = comm.split(SHARDS)
        alone, among_four = Rig(shard, text), Rig(shard, text, control=comm)
        return alone.step(gradients(comm.rank, 0)).flat(), among_four.step(gradients(comm.rank, 0)).flat()

    found = run_ranks(4, rank)
    assert all(torch.equal(mean, expected) for expected, mean in found)
    assert torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][1], found[1][1])


def test_a_failure_in_one_shard_is_told_to_all_by_the_rank_among_all() -> None:
    def compensate(*_: object) -> None:
        raise OSError("no room")

    def rank(comm: Comm) -> BaseException | None:
        rig = Rig(comm.split(SHARDS), "topk(ratio=0.1)", control=comm)
        if comm.rank == 3:
            rig.reducer.layout.flat_buffers[0].compensate = compensate  # type: ignore[assignment,method-assign]
        return rig.step(gradients(comm.rank, 0)).error

    *others, own = run_ranks(4, rank)
    assert isinstance(own, OSError)
    assert all(isinstance(error, PeerFailed) and "rank 3" in str(error) for error in others)
