"""Random indices without replacement."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.kernels import cpu


@lru_cache(maxsize=32)
def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """k of n indices (k,) int64, ascending, uniformly without replacement; equal seeds give equal draws.

    Cached, because encoding and both decodings of a unit ask for the same draw: do not write into it.

    >>> sample_indices(10, 10, seed=1).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if not 0 <= k <= n:
        raise ValueError(f"k={k} is outside 0 … n={n}")
    return torch.from_numpy(cpu.sample_indices(n, k, seed))
