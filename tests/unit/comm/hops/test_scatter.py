"""The broadcast by scatter and all-gather reaches everybody, and costs what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.comm.algorithms import scatter_broadcast
from tests.support.looped import looped
from tests.unit.comm.hops.meter import messages

WORLDS = (1, 2, 3, 4, 5, 7, 8)


@looped("world", WORLDS)
@looped("size", [0, 1, 2, 3, 7, 1000])
def test_everybody_holds_what_the_root_has(size: int, world: int) -> None:
    for src in range(world):

        def body(comm: ThreadComm, src: int = src) -> Tensor:
            tensor = torch.arange(size, dtype=torch.int32) + 10_000 * comm.rank
            comm.broadcast(tensor, src, "scatter").wait()
            return tensor

        for tensor in run_ranks(world, body):
            assert tensor.tolist() == [10_000 * src + place for place in range(size)]


@pytest.mark.parametrize("world", WORLDS)
def test_the_root_sends_most_and_receives_nothing(world: int) -> None:
    size, src = 8 * 3 * 5 * 7, world - 1
    sent = messages(world, lambda peers: scatter_broadcast(torch.zeros(size), src, peers))
    assert all(target != src for rank in sent for target, _numel in rank)
    by_rank = [sum(numel for _target, numel in rank) for rank in sent]
    assert max(by_rank) == by_rank[src] == 2 * (world - 1) * size // world
    wire_bytes = Round("broadcast", size, torch.float32, algorithm="scatter").wire_bytes(world)
    assert 4 * sum(by_rank) / world == pytest.approx(wire_bytes, rel=1e-15)
