"""Exact top-k by magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gradwire.kernels.cpu.bits import INFINITY, MAGNITUDE

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@njit(nogil=True, cache=True)
def _compact(bits: Any, threshold: Any, indices: Any) -> Any:
    """Write the indices whose magnitude reaches `threshold`; returns how many, or -1 if they do not fit.

    Branch-free: at 10 % kept, a branch would be mispredicted at every tenth element.
    """
    count, room = 0, indices.size - 1
    for i in range(bits.size):
        indices[min(count, room)] = i
        count += (bits[i] & MAGNITUDE) >= threshold
    return count if count <= room else -1


@njit(nogil=True, cache=True)
def _ordered(bits: Any) -> Any:
    """The magnitude as an integer, with every NaN equal to Inf: their bits would order them."""
    return min(np.int32(bits & MAGNITUDE), INFINITY)


@njit(nogil=True, cache=True)
def _finish(bits: Any, candidates: Any, threshold: Any, out: Any) -> None:
    """Keep candidates above `threshold`, and the first of those equal to it until `out` is full."""
    above = 0
    for i in candidates:
        above += _ordered(bits[i]) > threshold
    ties, count = out.size - above, 0
    for i in candidates:
        magnitude = _ordered(bits[i])
        if magnitude > threshold:
            out[count] = i
            count += 1
        elif magnitude == threshold and ties > 0:
            out[count] = i
            count += 1
            ties -= 1


@njit(nogil=True, cache=True)
def _magnitudes(bits: Any, indices: Any) -> Any:
    out = np.empty(indices.size, np.int32)
    for j in range(indices.size):
        out[j] = _ordered(bits[indices[j]])
    return out


SAMPLE = 16384


def topk_indices(x: Floats, k: int) -> Ints:
    """Exact top-k of float32: guess a threshold from a sample, compact what reaches it, finish exactly.

    The guess aims 4 standard deviations below the k-th largest, so that it fails about once in 10^4
    calls; a guess that fails, or a tie that overflows the buffer, is repaired by sorting everything.
    """
    out = np.empty(k, np.int64)
    if k == 0:
        return out
    bits = x.view(np.int32)
    candidates = _candidates(bits, k)
    magnitudes = _magnitudes(bits, candidates)
    threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    _finish(bits, candidates, threshold, out)
    return out


def _candidates(bits: NDArray[np.int32], k: int) -> Ints:
    """Indices of a superset of the top k, ascending."""
    n = bits.size
    if n > 2 * SAMPLE and k < n // 2:
        # An odd stride, so that the sample does not fall on one column of a power-of-two matrix.
        sample = bits[:: max(1, n // SAMPLE) | 1] & MAGNITUDE
        expected = k / n * sample.size
        rank = min(int(expected + 4 * expected**0.5) + 4, sample.size - 1)
        guess = min(np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank], INFINITY)
        # Mostly zeros: what is not zero is few, and may be enough.
        guess = max(guess, np.int32(1))
        buffer = np.empty(min(n, 2 * k + 16 * n // SAMPLE + 64) + 1, np.int64)
        count = _compact(bits, guess, buffer)
        if count >= k:
            return buffer[:count]
    return np.arange(n, dtype=np.int64)
