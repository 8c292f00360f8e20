"""One rank's choice of places to all: a broadcast where all know who it is, else a sum with zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.indices import index_words, pack_indices, unpack_indices
from gradwire.comm.base import Broadcasting, Comm, Round


def spread_indices(own: Tensor | None, count: int, like: Tensor, comm: Comm) -> Tensor:
    """The ascending indices (count,) of the rank that hands in its `own`; all others hand in `None`.

    They are places in `like` (numel,). One all-reduce of the packed indices, waited for, to which all others
    contribute zeros: 2(N-1)/N of the payload, but no root, so that a rank that fails before it knows who
    leads can still keep the agreed order. Raises `WireError` for what is no choice of `count` places.
    """
    words = _packed(own, count, like)
    comm.all_reduce(words).wait()
    return unpack_indices(words, count, like.numel())


def spread_round(count: int, numel: int) -> Round:
    """What `spread_indices` issues."""
    return Round("all_reduce", index_words(count, numel), torch.int32)


def broadcast_indices(
    own: Tensor | None, count: int, like: Tensor, comm: Comm, src: int, algorithm: Broadcasting
) -> Tensor:
    """As `spread_indices` from rank `src`, which all ranks know. One broadcast, waited for."""
    words = _packed(own, count, like)
    comm.broadcast(words, src, algorithm).wait()
    return unpack_indices(words, count, like.numel())


def broadcast_round(count: int, numel: int, src: int, algorithm: Broadcasting) -> Round:
    """What `broadcast_indices` issues."""
    size = index_words(count, numel)
    return Round("broadcast", size, torch.int32, src=src, algorithm=algorithm)


def _packed(own: Tensor | None, count: int, like: Tensor) -> Tensor:
    """(words,) int32; zeros of those who have no choice to hand in."""
    if own is not None:
        return pack_indices(own, like.numel())
    return torch.zeros(index_words(count, like.numel()), dtype=torch.int32, device=like.device)
