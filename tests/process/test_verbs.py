"""The verbs over real gloo ranks give what the slow computation gives, many of them under way at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.agreement.agree import checksum
from gradwire.comm import ProcessGroupComm
from gradwire.comm.algorithms import ALL_REDUCES
from gradwire.comm.base import Pending
from gradwire.comm.process_group import PIECE_BYTES, SHORT_BYTES, SWAP_BYTES, TURN_S
from tests.support.elsewhere import Elsewhere, There
from tests.support.ranks import ROOT
from tests.support.verbs import CALLS
from tests.support.world import Ranks

pytestmark = pytest.mark.process

LIMIT_S = 30.0


@dataclass(frozen=True)
class Held:
    """What a rank holds after a verb, and what the slow computation gives: checksums of the bytes."""

    verb: str
    held: int
    owed: int
    callback_came: bool = True


def _held(verb: str, held: Tensor, owed: Tensor, callback_came: bool = True) -> Held:
    return Held(f"{verb} of {held.numel()} {held.dtype}", checksum(held), checksum(owed), callback_came)


@dataclass(frozen=True)
class Verbs:
    """All that a rank holds, and the bits of a NaN on all ranks, which began with one each."""

    all: list[Held]
    nans: list[int]


def verbs() -> Verbs:
    """Every verb, one after another and many at once."""
    comm = ProcessGroupComm(dist.group.WORLD)
    rank, world = comm.rank, comm.world
    found = [_held(call.name, call.issue(comm), call.expected(rank, world)) for call in CALLS]
    called, one = threading.Event(), torch.ones(1)
    pending = comm.all_reduce(one)
    pending.then(called.set)
    pending.wait()
    pending.wait()  # twice is once
    found.append(_held("waited for twice", one, torch.full((1,), float(world)), called.wait(LIMIT_S)))
    # Two ranks swap what is small and ring what is large: the same sum, also of integers.
    for numel in (0, 7, SHORT_BYTES // 4, SHORT_BYTES // 4 + 1, SWAP_BYTES // 4, SWAP_BYTES // 4 + 1):
        tensor = torch.full((numel,), rank + 1, dtype=torch.int32)
        comm.all_reduce(tensor).wait()
        found.append(_held("sum", tensor, torch.full_like(tensor, world * (world + 1) // 2)))
    found += long_beside_short(comm)
    comm.expect(TURN_S / (SHORT_BYTES // 4))
    found += long_beside_short(comm, SHORT_BYTES // 4)
    # Rows longer than a piece travel in several messages.
    for dtype, numel in ((torch.uint8, 2 * PIECE_BYTES + 5), (torch.float64, PIECE_BYTES // 8 + 1)):
        places = torch.arange(numel)
        sent = torch.stack([(31 * places + 7 * rank + to) % 251 for to in range(world)]).to(dtype)
        received = torch.zeros_like(sent)
        comm.all_to_all(received, sent).wait()
        owed = [(31 * places + 7 * sender + rank) % 251 for sender in range(world)]
        found.append(_held("rows in pieces", received, torch.stack(owed).to(dtype)))
    square = torch.full((2, 3), float(rank))
    comm.all_reduce(square).wait()
    found.append(_held("square", square, torch.full((2, 3), world * (world - 1) / 2)))
    found += hops_beside_other_collectives(comm)
    found += of_a_device(comm)
    nans = torch.tensor([0x7FC00001 + rank], dtype=torch.int32).view(torch.float32)
    comm.all_reduce(nans).wait()
    seen = torch.empty(world, 1, dtype=torch.int32)
    comm.all_gather(seen, nans.view(torch.int32)).wait()
    return Verbs(found, seen.flatten().tolist())


def of_a_device(comm: ProcessGroupComm) -> Iterator[Held]:
    """Tensors that are not on the host go to the library's own collectives, by options made once."""
    rank, world = comm.rank, comm.world
    with Elsewhere():
        for dtype in 2 * (torch.float32, torch.uint8):
            summed = There(torch.full((5,), rank + 1, dtype=dtype))
            gathered = There(torch.zeros(world, 2, dtype=dtype))
            received = There(torch.zeros(world, 3, dtype=dtype))
            rows = 10 * rank + torch.arange(3 * world).view(world, 3)
            comm.all_reduce(summed).wait()
            comm.all_gather(gathered, There(torch.full((2,), rank, dtype=dtype))).wait()
            comm.all_to_all(received, There(rows.to(dtype))).wait()
            ranks, places = torch.arange(world).view(world, 1), torch.arange(3)
            owed = torch.full((5,), world * (world + 1) // 2, dtype=dtype)
            yield _held("sum on a device", summed.inner, owed)
            yield _held("gather on a device", gathered.inner, ranks.expand(world, 2).to(dtype))
            own = (10 * ranks + 3 * rank + places).to(dtype)
            yield _held("all-to-all on a device", received.inner, own)


def _waited(
    comm: ProcessGroupComm, under_way: list[tuple[str, Pending, threading.Event, Tensor, Tensor]]
) -> Iterator[Held]:
    """Each rank waits in an order of its own."""
    for verb, pending, ended, held, owed in under_way if comm.rank % 2 else reversed(under_way):
        pending.wait()
        yield _held(verb, held, owed, ended.wait(LIMIT_S))


def _shifted(comm: ProcessGroupComm) -> Held:
    passed = torch.zeros(3)
    comm.shift(passed, torch.full((3,), float(comm.rank))).wait()
    return _held("shift beside others", passed, torch.full((3,), float((comm.rank - 1) % comm.world)))


def long_beside_short(comm: ProcessGroupComm, border: int = SHORT_BYTES) -> Iterator[Held]:
    """Gathers and all-to-alls on both sides of `border` and shifts, all under way at once."""
    world, rank = comm.world, comm.rank
    under_way = []
    kinds = (torch.uint8, torch.bool, torch.bfloat16, torch.float64)
    for dtype, excess in product(kinds, (0, 5)):
        numel = border // dtype.itemsize + excess
        places = torch.arange(numel)
        out, received = (torch.zeros(world, numel, dtype=dtype) for _ in range(2))
        gather = comm.all_gather(out, ((places + rank) % 2).to(dtype))
        rows = torch.stack([(places + rank + to) % 2 for to in range(world)]).to(dtype)
        every = comm.all_to_all(received, rows)
        for verb, pending, held, shift in (("gather", gather, out, 0), ("all-to-all", every, received, rank)):
            pending.then((ended := threading.Event()).set)
            owed = torch.stack([(places + sender + shift) % 2 for sender in range(world)]).to(dtype)
            under_way.append((verb, pending, ended, held, owed))
        yield _shifted(comm)
    yield from _waited(comm, under_way)


def hops_beside_other_collectives(comm: ProcessGroupComm) -> Iterator[Held]:
    """Many under way at once; every rank does other things first."""
    world, rank = comm.world, comm.rank
    under_way = []

    def add(verb: str, pending: Pending, held: Tensor, owed: Tensor) -> None:
        pending.then((ended := threading.Event()).set)
        under_way.append((verb, pending, ended, held, owed))

    for number, (algorithm, size) in enumerate(product(ALL_REDUCES, (0, 1, 5, 70_001))):
        tensor = ((torch.arange(size) + number) % 251 * (rank + 1)).to(torch.int64)
        owed = (torch.arange(size) + number) % 251 * (world * (world + 1) // 2)
        add(algorithm, comm.all_reduce(tensor, algorithm), tensor, owed)
        root = number % world
        places = torch.arange(size) + 1000 * rank
        add("scatter", comm.broadcast(places, root, "scatter"), places, torch.arange(size) + 1000 * root)
        if number % 3 == rank % 3:
            under_way[-1][1].wait()
        # What needs all ranks must not wait for one that waits for hops.
        token = torch.ones(1)
        comm.all_reduce(token).wait()
        yield _held("sum beside hops", token, torch.full((1,), float(world)))
        yield _shifted(comm)
    yield from _waited(comm, under_way)
    comm.all_reduce(torch.ones(3), "tree").then((ended := threading.Event()).set)
    yield Held("tree that nobody waits for", 0, 0, ended.wait(LIMIT_S))


def _check(rank: Verbs, world: int) -> None:
    for each in rank.all:
        assert each.held == each.owed, each.verb
        assert each.callback_came, each.verb
    assert all(0x7FC00000 <= nan < 0x7FC00010 for nan in rank.nans), "NaN"
    # Two ranks keep the same one. What a ring does with them is gloo's business.
    assert world > 2 or len(set(rank.nans)) == 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_verbs_over_gloo(world: int, tmp_path: Path) -> None:
    for rank in Ranks(world, tmp_path)(verbs):
        _check(rank, world)


@pytest.mark.rest
@pytest.mark.timeout(240)
@pytest.mark.parametrize("after", ["test_verbs", "scenes_exit"])
def test_after_all_verbs_or_inside_a_callback_interpreters_end_in_good_order(
    after: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", f"tests.process.{after}"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "3", str(tmp_path / "meeting")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output


if __name__ == "__main__":  # to the end of a group and of an interpreter
    _rank, _world, _meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.FileStore(_meeting, _world)
    dist.init_process_group("gloo", store=store, rank=_rank, world_size=_world)
    _check(verbs(), _world)
    dist.destroy_process_group()
