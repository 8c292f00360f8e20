"""The verbs over real gloo ranks give what the slow computation gives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm
from gradwire.comm.base import DONE
from gradwire.comm.hops import ALL_REDUCES
from gradwire.comm.process_group import PIECE_BYTES, SHORT_BYTES, SWAP_BYTES, TURN_S
from tests.unit.comm.verbs import CALLS

ROOT = Path(__file__).parents[3]


def run_rank(rank: int, world: int, meeting_file: str) -> None:
    """Body of one process: every verb, compared with what this rank must hold."""
    store = dist.FileStore(meeting_file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    comm = ProcessGroupComm(dist.group.WORLD)
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
    dist.destroy_process_group()


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


class _Group:
    """Rank 0 of so many."""

    def __init__(self, world: int) -> None:
        self._world = world

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._world


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What c10d would be asked for, in order; nothing is, and all is done at once."""
    asked: list[str] = []
    monkeypatch.setattr(dist, "irecv", lambda _out, **_peer: asked.append("receive") or DONE)
    monkeypatch.setattr(dist, "isend", lambda _sent, **_peer: asked.append("send") or DONE)
    return asked


@pytest.mark.parametrize("verb", ["swap", "shift", "all_to_all"])
def test_receives_are_announced_before_anything_is_sent(verb: str, issued: list[str]) -> None:
    world = 2 if verb == "swap" else 4
    comm = ProcessGroupComm(cast("dist.ProcessGroup", _Group(world)))
    rows = torch.zeros(world, SHORT_BYTES + 4, dtype=torch.uint8)
    if verb == "swap":
        comm.all_gather(rows, rows[0].clone()).wait()
    elif verb == "shift":
        comm.shift(rows[0], rows[1]).wait()
    else:
        comm.all_to_all(rows, rows.clone()).wait()
    assert issued == sorted(issued)
    assert set(issued) == {"receive", "send"}


@pytest.mark.parametrize(
    ("byte_s", "border"),
    [(None, SHORT_BYTES), (0.0, SHORT_BYTES), (1 / 25e6, SHORT_BYTES), (8 / 13e6, 8125), (1.0, 0)],
)
@pytest.mark.parametrize("world", [2, 4])
def test_on_a_slow_link_less_is_short(
    world: int, byte_s: float | None, border: int, issued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: issued.append("library") or DONE)
    comm = ProcessGroupComm(cast("dist.ProcessGroup", _Group(world)))
    if byte_s is not None:
        comm.expect(byte_s)
    for excess in (0, 1):
        del issued[:]
        rows = torch.zeros(world, border + excess, dtype=torch.uint8)
        if world == 2:
            comm.all_gather(rows, rows[0].clone()).wait()
        else:
            comm.all_to_all(rows, rows.clone()).wait()
        assert ("library" in issued) == (excess == 0)


def test_a_scatter_announces_a_part_before_it_hands_on_the_last_one(issued: list[str]) -> None:
    comm = ProcessGroupComm(cast("dist.ProcessGroup", _Group(4)))
    comm.broadcast(torch.zeros(8), 3, "scatter").wait()
    assert issued == ["receive", *["receive", "send"] * 3]


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_verbs_over_gloo(world: int, tmp_path: Path) -> None:
    code = "import sys; from tests.unit.comm.test_process_group import run_rank as run; "
    code += "run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(world), str(tmp_path / "meeting")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
