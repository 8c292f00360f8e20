"""Real gloo ranks: one dies in the middle of the tree by which the status vote of many ranks goes, when those
below it have told it what they know; or of a ring, whose messages take one connection or several.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import Pending, ProcessGroupComm
from gradwire.comm.base import Algorithm
from gradwire.comm.process_group import GroupPeers
from tests.support.raised import Raised, raised
from tests.support.ranks import returned, started, wait_for

pytestmark = [pytest.mark.process, pytest.mark.rest]

WORLD, TIMEOUT_S = 5, 60.0
VICTIM = 2
"""It adds up what rank 3 says, and hands it on to rank 0, which rank 1 and 4 wait for."""


def _die(_peers: GroupPeers, _tensor: torch.Tensor, _target: int) -> Pending:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


def dies(algorithm: Algorithm, connections: int, numel: int) -> Raised:
    """By an all-reduce of few bytes, as of a status vote, or of more."""
    comm = ProcessGroupComm(dist.group.WORLD)
    comm.spread([dist.new_group() for _ in range(connections - 1)])
    comm.all_reduce(torch.ones(numel), algorithm).wait()  # all are connected
    killed = mock.patch.object(GroupPeers, "send", _die) if comm.rank == VICTIM else mock.MagicMock()
    if comm.rank == VICTIM and algorithm == "library":
        os.kill(os.getpid(), signal.SIGKILL)
    with killed:
        return raised(lambda: comm.all_reduce(torch.ones(numel), algorithm).wait())


CASES: list[tuple[Algorithm, int, int]] = [("tree", 1, 8), ("library", 1, 8), ("library", 3, 2**19)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Raised]]:
    """By case, what those see that are left. All at once: most of it is the start."""
    survivors = [rank for rank in range(WORLD) if rank != VICTIM]
    folders = [tmp_path_factory.mktemp("tree") for _ in CASES]  # not by several threads

    def happen(number: int) -> list[Raised]:
        with started(partial(dies, *CASES[number]), WORLD, folders[number], TIMEOUT_S) as ranks:
            wait_for([ranks[rank] for rank in survivors], 2 * TIMEOUT_S)
        return [returned(folders[number], rank) for rank in survivors]

    with ThreadPoolExecutor(len(CASES)) as pool:
        return list(pool.map(happen, range(len(CASES))))


@pytest.mark.parametrize("case", range(len(CASES)), ids=["tree", "ring", "connections"])
def test_no_rank_waits_for_the_timeout(found: list[list[Raised]], case: int) -> None:
    # As it was by the library's ring: a neighbour of the dead one hears of it at once, and the others when
    # their neighbours have ended.
    for heard in found[case]:
        assert heard.kind == "TransportError"
        assert heard.after_s < TIMEOUT_S / 2
