"""Numba on the CPU: one pass over memory per job, without the interpreter lock.

No `parallel=True`: Numba's workqueue layer aborts the process when two threads use it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_BLOCK = 4096  # elements; two arrays of it stay in the first-level cache between the inner loops


@njit(nogil=True, cache=True)
def _weighted_sum(out: Any, a: Any, b: Any, weight_a: Any, weight_b: Any) -> None:
    for i in range(out.size):
        out[i] = weight_a * a[i] + weight_b * b[i]


@njit(nogil=True, cache=True)
def _max_magnitude(bits: Any) -> Any:
    """Magnitudes compared as integers vectorise, and order NaN and Inf above everything."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return largest


@njit(nogil=True, cache=True)
def fold(working: Any, committed: Any, grad: Any, coefficient: Any, scale: Any) -> Any:
    """float32: working = coefficient · committed + scale · grad, with the flags of the reference."""
    grad_bits, sum_bits = grad.view(np.int32), working.view(np.int32)
    grad_max, sum_max = np.int32(0), np.int32(0)
    # Whole slices handed to small loops: index arithmetic inside the loops would stop vectorisation.
    for block in range((working.size + _BLOCK - 1) // _BLOCK):
        here = slice(block * _BLOCK, min((block + 1) * _BLOCK, working.size))
        _weighted_sum(working[here], committed[here], grad[here], coefficient, scale)
        grad_max = max(grad_max, _max_magnitude(grad_bits[here]))
        sum_max = max(sum_max, _max_magnitude(sum_bits[here]))
    return grad_max != 0, sum_max < _INFINITY


@njit(nogil=True, cache=True)
def _compact(bits: Any, threshold: Any, indices: Any) -> Any:
    """Write the indices whose magnitude reaches `threshold`; returns how many, or -1 if they do not fit.

    Branch-free: at 10 % kept, a branch would be mispredicted at every tenth element.
    """
    count, room = 0, indices.size - 1
    for i in range(bits.size):
        indices[min(count, room)] = i
        count += (bits[i] & _MAGNITUDE) >= threshold
    return count if count <= room else -1


@njit(nogil=True, cache=True)
def _ordered(bits: Any) -> Any:
    """The magnitude as an integer, with every NaN equal to Inf: their bits would order them."""
    return min(np.int32(bits & _MAGNITUDE), _INFINITY)


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


_SAMPLE = 16384


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
    if n > 2 * _SAMPLE and k < n // 2:
        # An odd stride, so that the sample does not fall on one column of a power-of-two matrix.
        sample = bits[:: max(1, n // _SAMPLE) | 1] & _MAGNITUDE
        expected = k / n * sample.size
        rank = min(int(expected + 4 * expected**0.5) + 4, sample.size - 1)
        guess = min(np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank], _INFINITY)
        # Mostly zeros: what is not zero is few, and may be enough.
        guess = max(guess, np.int32(1))
        buffer = np.empty(min(n, 2 * k + 16 * n // _SAMPLE + 64) + 1, np.int64)
        count = _compact(bits, guess, buffer)
        if count >= k:
            return buffer[:count]
    return np.arange(n, dtype=np.int64)


@njit(nogil=True, cache=True)
def take(x: Any, indices: Any, weight: Any, values: Any) -> None:
    """float32: values = weight · x[indices], then x[indices] = 0."""
    for j in range(indices.size):
        values[j] = weight * x[indices[j]]
    # A second pass, so that an index that occurs twice counts twice, as in the reference.
    for j in range(indices.size):
        x[indices[j]] = 0.0


@njit(nogil=True, cache=True)
def scatter(out: Any, indices: Any, values: Any) -> None:
    """float32: out[indices] = values."""
    for j in range(indices.size):
        out[indices[j]] = values[j]


@njit(nogil=True, cache=True)
def pack_bits(indices: Any, words: Any) -> None:
    """Set a bit of int32 `words` for each index."""
    for j in range(indices.size):
        words[indices[j] >> 5] |= np.int32(1) << (indices[j] & 31)


@njit(nogil=True, cache=True)
def unpack_bits(words: Any, out: Any) -> Any:
    """Write the indices of ones to `out` until it is full; returns how many."""
    count = 0
    for word in range(words.size):
        bits = words[word]
        if bits == 0:
            continue
        if count + 32 <= out.size:
            # No branch, which would be mispredicted at every other bit: write always, advance at a one.
            for bit in range(32):
                out[count] = word * 32 + bit
                count += (bits >> bit) & 1
            continue
        for bit in range(32):
            if (bits >> bit) & 1 and count < out.size:
                out[count] = word * 32 + bit
                count += 1
    return count


@njit(nogil=True, cache=True)
def sample_indices(n: Any, k: Any, seed: Any) -> Any:
    """Floyd's sampling with a bitmap; the same numbers as the reference."""
    taken = np.zeros((n + 63) // 64, np.uint64)
    state, one = np.uint64(seed), np.uint64(1)
    for top in range(n - k, n):
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        draw = ((z ^ (z >> np.uint64(31))) >> one) % np.uint64(top + 1)
        if (taken[draw >> np.uint64(6)] >> (draw & np.uint64(63))) & one:
            draw = np.uint64(top)
        taken[draw >> np.uint64(6)] |= one << (draw & np.uint64(63))
    out = np.empty(k, np.int64)
    count = 0
    for word in range(taken.size):
        bits = taken[word]
        if bits != 0:
            for bit in range(64):
                if (bits >> np.uint64(bit)) & one:
                    out[count] = word * 64 + bit
                    count += 1
    return out
