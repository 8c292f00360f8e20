"""Passes that look at each chunk of a tensor alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast

_LONGEST_CHUNK = 2**31
"""The kernel's keys hold a place within the chunk in 31 bits."""


def chunk_topk_indices(x: Tensor, chunk: int, keep: int) -> Tensor:
    """Indices int64, ascending, of the `keep` largest magnitudes of each `chunk` elements of x (n,).

    Of the last chunk, which may be shorter, as many as it has. Ties go to the lowest index; NaN and Inf
    count as the largest of all.

    >>> chunk_topk_indices(torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0]), 2, 1)
    tensor([1, 2, 4])
    """
    if not 1 <= keep <= chunk:
        raise ValueError(f"keep={keep} is outside 1 … chunk={chunk}")
    if not is_fast(x) or chunk > _LONGEST_CHUNK:
        return reference.chunk_topk_indices(x, chunk, keep)
    full, rest = divmod(x.numel(), chunk)
    found = np.empty(full * keep + min(keep, rest), np.int64)
    kernel = cpu.chunk_maxima if keep == 1 else cpu.chunk_topk
    kernel(x.numpy().view(np.int32), chunk, keep, found)
    return torch.from_numpy(found)


def indices_near_maxima(x: Tensor, chunk: int, scale: float) -> Tensor:
    """Indices int64, ascending, of elements of x (n,) that reach their chunk's largest magnitude / scale.

    `scale` is 1 or more. Zeros are never among them; where NaN or Inf is the largest, only such are.

    >>> indices_near_maxima(torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0]), 3, 2.0)
    tensor([1, 2])
    """
    if chunk < 1 or not 1.0 <= scale < math.inf:
        raise ValueError(f"chunk={chunk} and scale={scale} must both be 1 or more, and finite")
    if not is_fast(x):
        return reference.indices_near_maxima(x, chunk, scale)
    # Pages of the buffer that are not written to take no memory.
    found = np.empty(x.numel() + 1, np.int64)
    count = cpu.indices_near_maxima(x.numpy().view(np.int32), chunk, np.float32(scale), found)
    return torch.from_numpy(found[:count])
