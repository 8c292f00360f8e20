"""Elements that reach a threshold, and sums over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.bits import MAGNITUDE
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.threshold import Moments, rounded

_BLOCK = 32  # of longer ones, too many hold an element when one in a hundred is wanted
_LANES = 1024  # independent sums in the first-level cache: without fast-math, one sum cannot be vectorised


def indices_reaching(x: Tensor, threshold: float, capacity: int) -> Tensor:
    """Twin of `gradwire.kernels.threshold.indices_reaching`. Collect indices block by block; blocks without
    such elements are skipped.
    """
    limit = np.float32(rounded(threshold, x.dtype)).view(np.int32)
    found = np.empty(min(capacity, x.numel()) + 1, np.int64)
    count = _indices_reaching(x.numpy().view(np.int32), limit, found)
    return torch.from_numpy(found[:count])


def moments_reaching(x: Tensor, threshold: float) -> Moments:
    """Twin of `gradwire.kernels.threshold.moments_reaching`. Sum in float64 over independent lanes."""
    count, total, squares = _moments_reaching(x.numpy(), np.float32(rounded(threshold, x.dtype)))
    return Moments(int(count), float(total), float(squares))


@kernel
def largest_bits(bits: Any) -> Any:
    """Largest magnitude of float32 `bits`, as int32."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    return largest


@kernel
def _first_beyond(bits: Any, threshold: Any, out: Any, start: Any) -> Any:
    """Correct the last entry of a full `out`: the first index after the others at which `bits`, as int32,
    reach `threshold`, in the block at `start` or later.

    Returns the size of `out`.
    """
    last = out[out.size - 2] if out.size > 1 else -1
    i = max(start, last + 1)
    while (bits[i] & MAGNITUDE) < threshold:
        i += 1
    out[out.size - 1] = i
    return out.size


@prepared("int32[::1], int32, int64[::1]")
@kernel
def _indices_reaching(bits: Any, threshold: Any, out: Any) -> Any:
    """Write the indices whose magnitude reaches `threshold` until `out` is full; returns their number.

    Blocks without such an element, most of them, are skipped at the speed of memory. The last entry of `out`
    is overwritten with every candidate, valid or not.
    """
    count, room = 0, out.size - 1
    for start in range(0, bits.size, _BLOCK):
        stop = min(start + _BLOCK, bits.size)
        if largest_bits(bits[start:stop]) < threshold:
            continue
        # Without a branch, which would be mispredicted at every element that counts.
        for i in range(start, stop):
            out[min(count, room)] = i
            count += (bits[i] & MAGNITUDE) >= threshold
        if count > room:
            return _first_beyond(bits, threshold, out, start)
    return count


@kernel
def _accumulate(x: Any, threshold: Any, counts: Any, totals: Any, squares: Any) -> None:
    for lane in range(x.size):
        magnitude = abs(x[lane])
        # Not `>=`, so that NaN counts and shows in the sums.
        reaches = not magnitude < threshold
        value = np.float64(magnitude) if reaches else 0.0
        counts[lane] += reaches
        totals[lane] += value
        squares[lane] += value * value


@prepared("float32[::1], float32")
@kernel
def _moments_reaching(x: Any, threshold: Any) -> Any:
    """(number of elements that reach `threshold`, Σ|x|, Σ|x|²) of float32 x, summed in float64."""
    counts, totals, squares = np.zeros(_LANES, np.int64), np.zeros(_LANES), np.zeros(_LANES)
    for start in range(0, x.size, _LANES):
        _accumulate(x[start : start + _LANES], threshold, counts, totals, squares)
    return counts.sum(), totals.sum(), squares.sum()
