"""Tree all-reduce: a binomial tree adds up towards rank 0, and the same tree hands the sum down.

Tyagi and Swany 2024, "Flexible communication …", table I: 2α·log N + 2·log N·Mβ. Rank 0 sends log N·M and
receives as much, a leaf sends and receives M. Nothing is pipelined (NCCL's tree is), so that large
payloads take log N times as long as they must.

Order of addition: sums of neighbouring ranks, then of neighbouring pairs, and so on, the lower rank's sum
first: (x_0 + x_1) + (x_2 + x_3). Rank 0 has the sum, whose bits all others get.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.hops.base import Peers


def strides(world: int) -> tuple[int, ...]:
    """1, 2, 4 … below `world`: how far partners are apart, level by level.

    >>> strides(5), strides(1)
    ((1, 2, 4), ())
    """
    return tuple(2**level for level in range((world - 1).bit_length()))


def tree_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place. Ranks that add take as much memory beside it."""
    flat = tensor.view(-1)
    _add_up(flat, peers)
    _hand_down(flat, peers)


def _add_up(flat: Tensor, peers: Peers) -> None:
    other: Tensor | None = None
    for by in strides(peers.world):
        if peers.rank % (2 * by) == by:
            peers.send(flat, peers.rank - by).wait()
            return
        if peers.rank + by < peers.world:
            other = torch.empty_like(flat) if other is None else other
            peers.receive(other, peers.rank + by).wait()
            flat += other


def _hand_down(flat: Tensor, peers: Peers) -> None:
    for by in reversed(strides(peers.world)):
        if peers.rank % (2 * by) == by:
            peers.receive(flat, peers.rank - by).wait()
        elif peers.rank % (2 * by) == 0 and peers.rank + by < peers.world:
            peers.send(flat, peers.rank + by).wait()
