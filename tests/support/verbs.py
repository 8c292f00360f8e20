"""One call of each verb with position-coded input, and its result computed the slow way.

Shared by every implementation of `Comm`, and by a real process group in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm import Comm
from gradwire.comm.base import Algorithm

SIZE = 6


def coded(rank: int, size: int = SIZE) -> Tensor:
    """Element i of rank r is 100·(r + 1) + i: a misplaced element shows."""
    return 100.0 * (rank + 1) + torch.arange(size, dtype=torch.float32)


class Call(NamedTuple):
    """A verb as a rank issues it, and what that rank must hold afterwards."""

    name: str
    issue: Callable[[Comm], Tensor]
    expected: Callable[[int, int], Tensor]


def _all_reduce(algorithm: Algorithm = "library") -> Callable[[Comm], Tensor]:
    def issue(comm: Comm) -> Tensor:
        tensor = coded(comm.rank)
        comm.all_reduce(tensor, algorithm).wait()
        return tensor

    return issue


def _sum(rank: int, world: int) -> Tensor:
    return torch.stack([*map(coded, range(world))]).sum(0)


def _all_gather(comm: Comm) -> Tensor:
    out = torch.full((comm.world, SIZE), torch.nan)
    comm.all_gather(out, coded(comm.rank)).wait()
    return out


def _broadcast(comm: Comm) -> Tensor:
    tensor = coded(comm.rank)
    comm.broadcast(tensor, comm.world - 1).wait()
    return tensor


def _scatter(comm: Comm) -> Tensor:
    tensor = coded(comm.rank)
    comm.broadcast(tensor, comm.world // 2, "scatter").wait()
    return tensor


def _all_to_all(comm: Comm) -> Tensor:
    out = torch.full((comm.world, SIZE), torch.nan)
    comm.all_to_all(out, coded(comm.rank, comm.world * SIZE).view(comm.world, SIZE)).wait()
    return out


def _shift(by: int) -> Callable[[Comm], Tensor]:
    def issue(comm: Comm) -> Tensor:
        out = torch.full((SIZE,), torch.nan)
        comm.shift(out, coded(comm.rank), by).wait()
        return out

    return issue


def _rows(rank: int, world: int) -> Tensor:
    matrices = [coded(sender, world * SIZE).view(world, SIZE) for sender in range(world)]
    return torch.stack([matrix[rank] for matrix in matrices])


CALLS = (
    Call("all_reduce", _all_reduce(), _sum),
    Call("all_gather", _all_gather, lambda rank, world: torch.stack([*map(coded, range(world))])),
    Call("broadcast", _broadcast, lambda rank, world: coded(world - 1)),
    Call("all_to_all", _all_to_all, _rows),
    Call("shift by 1", _shift(1), lambda rank, world: coded((rank - 1) % world)),
    Call("shift by 2", _shift(2), lambda rank, world: coded((rank - 2) % world)),
    Call("shift back", _shift(-1), lambda rank, world: coded((rank + 1) % world)),
    Call("ring all_reduce", _all_reduce("ring"), _sum),
    Call("tree all_reduce", _all_reduce("tree"), _sum),
    Call("star all_reduce", _all_reduce("star"), _sum),
    Call("scatter broadcast", _scatter, lambda rank, world: coded(world // 2)),
)
