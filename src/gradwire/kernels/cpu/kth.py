"""The k-th largest magnitude, exactly, by counting.

Radix selection from the most significant digit (Knuth 1998, The Art of Computer Programming 3, section
5.2.5), on magnitudes as integers. It makes a histogram of the range that holds the answer, keeps the one bin
that does, and repeats until the bin is one number.

Differences from the textbook: the range starts at the smallest and largest magnitude that occur, not at all
31 bits, so that two histograms usually suffice. Few elements get few bins, so that clearing and walking them
costs no more than counting.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.bits import INFINITY, magnitude
from gradwire.kernels.cpu.jit import kernel

_MOST_BINS = 8192  # 64 kB: larger histograms leave the first-level cache


@kernel
def _extremes(bits: Any) -> Any:
    low, high = INFINITY, np.int32(0)
    for j in range(bits.size):
        here = magnitude(bits[j])
        low, high = min(low, here), max(high, here)
    return low, high


@kernel
def _count(bits: Any, low: Any, high: Any, shift: Any, bins: Any) -> None:
    """Histogram of the magnitudes in low … high, with bins of 2^shift magnitudes each."""
    bins[:] = 0
    for j in range(bits.size):
        here = magnitude(bits[j])
        if low <= here <= high:
            bins[(here - low) >> shift] += 1


@kernel
def kth_magnitude(bits: Any, k: Any) -> Any:
    """Find the k-th largest magnitude t of `bits` (n,), int32 bits of float32, with 1 ≤ k ≤ n.

    Returns (t, number of elements equal to t among the k largest).
    """
    low, high = _extremes(bits)
    bins = np.empty(max(16, min(_MOST_BINS, bits.size)), np.int64)
    ties = k
    while low < high:
        shift = 0
        while (high - low) >> shift >= bins.size:
            shift += 1
        _count(bits, low, high, shift, bins)
        found = (high - low) >> shift
        while bins[found] < ties:
            ties -= bins[found]
            found -= 1
        low = np.int32(low + (found << shift))
        # The difference first: low plus a bin's width may lie beyond int32.
        high = np.int32(low + min(high - low, (1 << shift) - 1))
    return low, ties
