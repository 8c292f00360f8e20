"""From one rank to all without a root: an all-reduce to which all others contribute zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec import indices as places
from gradwire.comm.base import Comm, Round


def spread_indices(own: Tensor | None, count: int, like: Tensor, comm: Comm) -> Tensor:
    """The ascending indices (count,) of the rank that hands in its `own`; all others hand in `None`.

    They are places in `like` (numel,). One all-reduce of the packed indices, waited for: in time a
    scatter-all-gather broadcast, 2(N-1)/N of the payload against log N for a tree, and a rank that fails
    can still keep the agreed order. Raises `WireError` for what is no choice of `count` places.
    """
    numel = like.numel()
    if own is None:
        words = torch.zeros(places.words(count, numel), dtype=torch.int32, device=like.device)
    else:
        words = places.pack(own, numel)
    comm.all_reduce(words).wait()
    return places.unpack(words, count, numel)


def spread_round(count: int, numel: int) -> Round:
    """What `spread_indices` issues."""
    return Round("all_reduce", places.words(count, numel), torch.int32)
