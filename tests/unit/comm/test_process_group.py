"""The verbs over real gloo ranks give what the slow computation gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm
from gradwire.comm.process_group import PIECE_BYTES, SWAP_BYTES
from tests.unit.comm.verbs import CALLS

ROOT = Path(__file__).parents[3]


def run_rank(rank: int, world: int, meeting_file: str) -> None:
    """Body of one process: every verb, compared with what this rank must hold."""
    store = dist.FileStore(meeting_file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    comm = ProcessGroupComm(dist.group.WORLD)
    for call in CALLS:
        assert torch.equal(call.issue(comm), call.expected(rank, world)), f"{call.name} on rank {rank}"
    called = []
    pending = comm.all_reduce(torch.ones(1))
    pending.then(lambda: called.append(True))
    pending.wait()
    pending.wait()  # twice is once
    dist.barrier()
    assert called == [True]
    # Two ranks swap what is small and ring what is large: the same sum, also of integers.
    for numel in (0, 7, SWAP_BYTES // 4 + 1):
        tensor = torch.full((numel,), rank + 1, dtype=torch.int32)
        comm.all_reduce(tensor).wait()
        assert (tensor == world * (world + 1) // 2).all()
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
    assert world == 3 or (seen == seen[0]).all()  # what a ring does with them is gloo's business
    square = torch.full((2, 3), float(rank))
    comm.all_reduce(square).wait()
    assert (square == world * (world - 1) / 2).all()
    dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2, 3])
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
