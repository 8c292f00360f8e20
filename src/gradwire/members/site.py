"""The ranks that make up one replica, inside a machine: they live and die as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire.comm import Comm, gathered
from gradwire.errors import GradwireError, TransportError
from gradwire.members.round import LOST


class Site:
    """Agreement among the ranks of one replica, which call the same methods in the same order. A single rank
    sends nothing.
    """

    def __init__(self, comm: Comm) -> None:
        """`comm` carries tensors on the CPU."""
        self.comm, self.rank, self.size = comm, comm.rank, comm.world

    def told(self, text: str) -> str:
        """Broadcast the first rank's `text`. Returns it on all ranks. A collective: two broadcasts."""
        mine = text.encode()
        length = torch.tensor([len(mine)], device="cpu")
        self.comm.broadcast(length, 0).wait()
        flat = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            flat.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        self.comm.broadcast(flat, 0).wait()
        return bytes(flat.tolist()).decode()

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the first rank's `tensors`, contiguous on the CPU, over those of the other ranks. A
        collective: one broadcast each.
        """
        for each in tensors:
            self.comm.broadcast(each.view(-1).view(torch.uint8), 0).wait()

    def dealt(self, pieces: Sequence[bytes | memoryview]) -> Tensor:
        """Give each rank its own of the first rank's `pieces`: uint8 (bytes,). If there is only one, all get
        that. A collective: two broadcasts, and one for each piece. What other ranks pass has no effect.
        """
        mine = torch.empty(0, dtype=torch.uint8, device="cpu")
        lengths = json.loads(self.told(json.dumps([len(each) for each in pieces])))
        for number, length in enumerate(lengths):
            flat = torch.empty(length, dtype=torch.uint8, device="cpu")
            if self.rank == 0:
                flat.numpy()[:] = np.frombuffer(pieces[number], dtype=np.uint8)
            self.comm.broadcast(flat, 0).wait()
            if len(lengths) == 1 or number == self.rank:
                mine = flat
        return mine

    def collected(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, in rank order, on the first one; nothing elsewhere. A collective: one
        all-gather, and a broadcast for each rank.
        """
        found = []
        for rank, length in enumerate(self.numbers(len(mine))):
            flat = torch.empty(length, dtype=torch.uint8, device="cpu")
            if rank == self.rank:
                flat.numpy()[:] = np.frombuffer(mine, dtype=np.uint8)
            self.comm.broadcast(flat, rank).wait()
            if self.rank == 0:
                found.append(flat.numpy().tobytes())
        return found

    def numbers(self, mine: int) -> list[int]:
        """Gather the number `mine` of each rank, in rank order. A collective."""
        told: list[int] = gathered(self.comm, torch.tensor([mine], device="cpu"))[:, 0].tolist()
        return told

    def agree(self, failure: BaseException | None) -> None:
        """Raise `failure`, or an error if another rank has one. A collective.

        The error is in `LOST` if no rank has failed by itself: then the replica goes on.
        """
        mine = _FAILED if failure is not None and not isinstance(failure, LOST) else int(failure is not None)
        told = self.numbers(mine)
        failed = [rank for rank, each in enumerate(told) if each == _FAILED]
        if failure is not None and (mine == _FAILED or not failed):
            raise failure
        if failed:
            raise GradwireError(f"ranks {failed} of this replica have failed, and with them the replica")
        if lost := [rank for rank, each in enumerate(told) if each]:
            raise TransportError(f"ranks {lost} of this replica have lost the others")


_FAILED = 2
"""Of a rank that has failed by itself; 1 is of one that has lost the others, 0 of one that goes on."""
