"""A rank that dies in the middle of a tree, when those below it have told it what they know; or of a ring,
whose messages take one connection or several."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.comm import Pending, ProcessGroupComm
from gradwire.comm.base import Algorithm
from gradwire.comm.process_group import GroupPeers
from gradwire.errors import TransportError

VICTIM = 2
"""Of five ranks: it adds up what rank 3 says, and hands it on to rank 0, which rank 1 and 4 wait for."""


def dies(algorithm: Algorithm, connections: int = 1, numel: int = 8) -> dict[str, Any]:
    """An all-reduce of few bytes, as of a status vote; what it raises, and after how long."""
    comm = ProcessGroupComm(dist.group.WORLD)
    comm.spread([dist.new_group() for _ in range(connections - 1)])
    comm.all_reduce(torch.ones(numel), algorithm).wait()  # all are connected
    killed = mock.patch.object(GroupPeers, "send", _killed) if comm.rank == VICTIM else mock.MagicMock()
    if comm.rank == VICTIM and algorithm == "library":
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with killed:
        try:
            comm.all_reduce(torch.ones(numel), algorithm).wait()
        except TransportError as error:
            return {"error": str(error), "after_s": time.monotonic() - start_s}
    return {"error": "", "after_s": time.monotonic() - start_s}


def _killed(_peers: GroupPeers, _tensor: torch.Tensor, _target: int) -> Pending:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


SCENES: dict[str, Callable[[], Any]] = {
    "tree": partial(dies, "tree"),
    "library": partial(dies, "library"),
    "connections": partial(dies, "library", connections=3, numel=2**19),
}
