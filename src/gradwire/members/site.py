"""The ranks that make up one replica, inside a machine: they live and die as a whole."""

from __future__ import annotations

from collections.abc import Sequence

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
