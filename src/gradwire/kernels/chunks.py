"""Passes that look at each chunk of a tensor alone."""

from __future__ import annotations

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


def indices_near_maxima(x: Tensor, ahead: Tensor, chunk: int) -> Tensor:
    """Indices int64, ascending, where |ahead| reaches the largest |x| of the chunk; both are (n,).

    The largest of x itself is among them, zeros of x never are; where NaN or Inf is the largest, only such.

    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0])
    >>> indices_near_maxima(x, 2 * x, 3)
    tensor([1, 2])
    """
    if chunk < 1 or x.shape != ahead.shape:
        raise ValueError(f"chunk={chunk} must be 1 or more, and {ahead.shape} be {x.shape}")
    if not is_fast(x, ahead):
        return reference.indices_near_maxima(x, ahead, chunk)
    # Pages of the buffer that are not written to take no memory.
    found = np.empty(x.numel() + 1, np.int64)
    count = cpu.indices_near_maxima(x.numpy().view(np.int32), ahead.numpy().view(np.int32), chunk, found)
    return torch.from_numpy(found[:count])
