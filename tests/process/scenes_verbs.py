"""A scene of all verbs over real ranks, many of them under way at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm
from gradwire.comm.algorithms import ALL_REDUCES
from gradwire.comm.process_group import PIECE_BYTES, SHORT_BYTES, SWAP_BYTES, TURN_S
from tests.support.elsewhere import Elsewhere, There
from tests.support.verbs import CALLS


def verbs() -> None:
    """Every verb, compared with what this rank must hold."""
    comm = ProcessGroupComm(dist.group.WORLD)
    rank, world = comm.rank, comm.world
    for call in CALLS:
        assert torch.equal(call.issue(comm), call.expected(rank, world)), f"{call.name} on rank {rank}"
    called = threading.Event()
    pending = comm.all_reduce(torch.ones(1))
    pending.then(called.set)
    pending.wait()
    pending.wait()  # twice is once
    assert called.wait(30)
    # Two ranks swap what is small and ring what is large: the same sum, also of integers.
    for numel in (0, 7, SHORT_BYTES // 4, SHORT_BYTES // 4 + 1, SWAP_BYTES // 4, SWAP_BYTES // 4 + 1):
        tensor = torch.full((numel,), rank + 1, dtype=torch.int32)
        comm.all_reduce(tensor).wait()
        assert (tensor == world * (world + 1) // 2).all()
    long_beside_short(comm)
    comm.expect(TURN_S / (SHORT_BYTES // 4))
    long_beside_short(comm, SHORT_BYTES // 4)
    # Rows longer than a piece travel in several messages.
    for dtype, numel in ((torch.uint8, 2 * PIECE_BYTES + 5), (torch.float64, PIECE_BYTES // 8 + 1)):
        places = torch.arange(numel)
        sent = torch.stack([(31 * places + 7 * rank + to) % 251 for to in range(world)]).to(dtype)
        received = torch.zeros_like(sent)
        comm.all_to_all(received, sent).wait()
        owed = [(31 * places + 7 * sender + rank) % 251 for sender in range(world)]
        assert torch.equal(received, torch.stack(owed).to(dtype))
    # Two NaNs with different bits: all ranks must keep the same one.
    nans = torch.tensor([0x7FC00001 + rank], dtype=torch.int32).view(torch.float32)
    comm.all_reduce(nans).wait()
    seen = torch.empty(world, 1, dtype=torch.int32)
    comm.all_gather(seen, nans.view(torch.int32)).wait()
    assert nans.isnan().all()
    assert world > 2 or (seen == seen[0]).all()  # what a ring does with them is gloo's business
    square = torch.full((2, 3), float(rank))
    comm.all_reduce(square).wait()
    assert (square == world * (world - 1) / 2).all()
    hops_beside_other_collectives(comm)
    of_a_device(comm)


def of_a_device(comm: ProcessGroupComm) -> None:
    """Tensors that are not on the host go to the library's own collectives, by options made once."""
    rank, world = comm.rank, comm.world
    with Elsewhere():
        for dtype in (torch.float32, torch.uint8):
            for _again in range(2):
                summed = There(torch.full((5,), rank + 1, dtype=dtype))
                gathered = There(torch.zeros(world, 2, dtype=dtype))
                received = There(torch.zeros(world, 3, dtype=dtype))
                rows = 10 * rank + torch.arange(3 * world).view(world, 3)
                comm.all_reduce(summed).wait()
                comm.all_gather(gathered, There(torch.full((2,), rank, dtype=dtype))).wait()
                comm.all_to_all(received, There(rows.to(dtype))).wait()
                assert summed.inner.tolist() == [world * (world + 1) / 2] * 5
                assert gathered.inner.tolist() == [[source] * 2 for source in range(world)]
                own = [[10 * source + 3 * rank + place for place in range(3)] for source in range(world)]
                assert received.inner.tolist() == own


def long_beside_short(comm: ProcessGroupComm, border: int = SHORT_BYTES) -> None:
    """Gathers and all-to-alls on both sides of `border` and shifts, all under way at once."""
    world, rank = comm.world, comm.rank
    under_way = []
    kinds = (torch.uint8, torch.bool, torch.bfloat16, torch.float64)
    for dtype, excess in product(kinds, (0, 5)):
        numel = border // dtype.itemsize + excess
        places = torch.arange(numel)
        ends = threading.Event()
        out = torch.zeros(world, numel, dtype=dtype)
        gather = comm.all_gather(out, ((places + rank) % 2).to(dtype))
        gather.then(ends.set)
        owed = torch.stack([(places + sender) % 2 for sender in range(world)]).to(dtype)
        under_way.append((gather, ends, out, owed))
        ends, received = threading.Event(), torch.zeros(world, numel, dtype=dtype)
        every = comm.all_to_all(
            received, torch.stack([(places + rank + to) % 2 for to in range(world)]).to(dtype)
        )
        every.then(ends.set)
        owed = torch.stack([(places + sender + rank) % 2 for sender in range(world)]).to(dtype)
        under_way.append((every, ends, received, owed))
        passed = torch.zeros(3)
        comm.shift(passed, torch.full((3,), float(rank))).wait()
        assert (passed == (rank - 1) % world).all()
    for pending, ends, out, owed in under_way if rank % 2 else reversed(under_way):
        pending.wait()
        assert torch.equal(out, owed)
        assert ends.wait(30)


def hops_beside_other_collectives(comm: ProcessGroupComm) -> None:
    """Many under way at once; every rank waits in an order of its own and does other things first."""
    world, rank = comm.world, comm.rank
    under_way = []
    for number, (algorithm, size) in enumerate(product(ALL_REDUCES, (0, 1, 5, 70_001))):
        tensor = ((torch.arange(size) + number) % 251 * (rank + 1)).to(torch.int64)
        expected = (torch.arange(size) + number) % 251 * (world * (world + 1) // 2)
        under_way.append((comm.all_reduce(tensor, algorithm), tensor, expected))
        root = number % world
        places = torch.arange(size) + 1000 * rank
        under_way.append((comm.broadcast(places, root, "scatter"), places, torch.arange(size) + 1000 * root))
        if number % 3 == rank % 3:
            under_way[-1][0].wait()
        # What needs all ranks must not wait for one that waits for hops.
        token, passed = torch.ones(1), torch.zeros(1)
        comm.all_reduce(token).wait()
        comm.shift(passed, torch.full((1,), float(rank))).wait()
        assert (token.item(), passed.item()) == (world, (rank - 1) % world)
    for pending, tensor, expected in under_way if rank % 2 else reversed(under_way):
        pending.wait()
        assert torch.equal(tensor, expected)
    ended = threading.Event()
    comm.all_reduce(torch.ones(3), "tree").then(ended.set)
    assert ended.wait(30)


SCENES: dict[str, Callable[[], Any]] = {"verbs": verbs}


if __name__ == "__main__":  # to the end of a group and of an interpreter
    _rank, _world, _meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.FileStore(_meeting, _world)
    dist.init_process_group("gloo", store=store, rank=_rank, world_size=_world)
    verbs()
    dist.destroy_process_group()
