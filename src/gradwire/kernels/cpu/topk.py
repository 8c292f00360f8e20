"""Exact top-k by magnitude in one pass over memory: candidates are collected by a threshold that only rises.

A sample gives a threshold a little below the k-th largest magnitude. One pass over blocks that fit the
first-level cache collects all elements that reach it. Whenever the room for candidates is full, the k largest
are kept, and the threshold rises above the smallest of them: a later element equal to it would lose the tie
to a lower index. So ties, constants and zeros cost no more than noise. Any threshold that k elements reach
gives the exact answer. One that fewer reach (about one in 10^4, by chance) costs a second pass.

The sampled threshold is that of DGC (Lin et al. 2018, section 3), made exact. Differences: DGC sends every
element that reaches it, and repeats the sampling if these are far too many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.bits import magnitude
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.kth import kth_magnitude
from gradwire.kernels.cpu.prepared import prepared

SAMPLE = 16384
BLOCK = 4096  # elements; a multiple of 8, and two arrays of it stay in the first-level cache


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Twin of `gradwire.kernels.topk.topk_indices`. Select in one pass over memory."""
    return torch.from_numpy(_topk_indices(x.numpy(), k))


@kernel
def _flag(bits: Any, threshold: Any, flags: Any) -> None:
    for i in range(bits.size):
        flags[i] = magnitude(bits[i]) >= threshold


@kernel
def _eights(flags: Any, which: Any) -> Any:
    """Write the numbers of the groups of eight `flags` that contain a set one; returns how many there are."""
    words, count = flags.view(np.uint64), 0
    for word in range(words.size):
        # Here and below: write always, advance if it counts. A branch would be mispredicted too often.
        which[count] = word
        count += words[word] != 0
    return count


@kernel
def _sift_block(
    bits: Any, start: Any, threshold: Any, flags: Any, which: Any, indices: Any, kept: Any, count: Any
) -> Any:
    """Append the elements of a whole block that reach `threshold` to the candidates; returns the new count.

    Args:
        bits: int32 bits of the block, which begins at element `start`.
        threshold: magnitude, as bits.
        flags, which: scratch memory.
        indices, kept: indices and bits of the candidates, written from `count` on.

    At 1 %, nine groups of eight in ten have none and are skipped.
    """
    _flag(bits, threshold, flags)
    for group in range(_eights(flags, which)):
        first = np.int64(which[group]) * 8
        for i in range(first, first + 8):
            indices[count] = start + i
            kept[count] = bits[i]
            count += flags[i]
    return count


@kernel
def _sift_rest(bits: Any, start: Any, threshold: Any, indices: Any, kept: Any, count: Any) -> Any:
    """Append the elements after the last whole block that reach `threshold`; returns the new count. The
    arguments are as in `_sift_block`.
    """
    for i in range(bits.size):
        indices[count] = start + i
        kept[count] = bits[i]
        count += magnitude(bits[i]) >= threshold
    return count


@kernel
def _keep_largest(indices: Any, kept: Any, count: Any, k: Any) -> Any:
    """Keep the k largest of the first `count` candidates: move them to the front, in the order that they
    have.

    Args:
        indices, kept: index and value (as bits) of each candidate, updated.
        k: at most `count`. Of equal magnitudes the first ones are kept.

    Returns the smallest kept magnitude, as bits.
    """
    threshold, ties = kth_magnitude(kept[:count], k)
    to = 0
    for j in range(count):
        if to == k:
            break
        here = magnitude(kept[j])
        indices[to], kept[to] = indices[j], kept[j]
        tie = (here == threshold) & (ties > 0)
        ties -= tie
        to += (here > threshold) | tie
    return threshold


@kernel
def _sift(x: Any, k: Any, threshold: Any, indices: Any, kept: Any) -> Any:
    """Collect the candidates of x; returns their number, which is below k if too few reach `threshold`.

    `indices` and `kept` have room for k candidates, a block, and one more.
    """
    bits = x.view(np.int32)
    flags, which = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8 + 1, np.uint16)
    count, room = 0, indices.size - min(x.size, BLOCK) - 1
    for start in range(0, x.size, BLOCK):
        here = slice(start, min(start + BLOCK, x.size))
        if here.stop - start == BLOCK:
            count = _sift_block(bits[here], start, threshold, flags, which, indices, kept, count)
        else:
            count = _sift_rest(bits[here], start, threshold, indices, kept, count)
        if count > room:
            threshold = np.int32(_keep_largest(indices, kept, count, k) + 1)
            count = k
    return count


@kernel
def _guess(x: Any, k: Any) -> Any:
    """Threshold that the k-th largest magnitude very likely reaches, estimated from a sample, as bits.

    The aimed rank lies 4 standard deviations of the sample's count below k's. One element is drawn at random
    from each of equal stretches: a fixed stride could fall on one column of a matrix. Returns 0, which every
    element reaches, if x is small or k is large.
    """
    sample = np.empty(min(SAMPLE, x.size // 32), np.float32)
    if sample.size == 0:
        return np.int32(0)
    stretch, random = x.size // sample.size, np.uint64(1)
    for j in range(sample.size):
        # Knuth's MMIX generator; its low bits have short periods.
        random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        i = j * stretch + np.int64((random >> np.uint64(33)) % np.uint64(stretch))
        sample[j] = x[i]
    expected = k / x.size * sample.size
    rank = int(expected + 4 * expected**0.5) + 4
    if rank > sample.size:
        return np.int32(0)
    return kth_magnitude(sample.view(np.int32), rank)[0]


@prepared("float32[::1], int64")
@kernel
def _topk_indices(x: Any, k: Any) -> Any:
    """Exact top-k of float32 x: ascending int64 indices.

    They are a view of the larger array of candidates: new memory would cost more than a third of the whole
    pass.
    """
    room = min(x.size, 2 * k + 4 * BLOCK) + min(x.size, BLOCK) + 1
    indices, kept = np.empty(room, np.int64), np.empty(room, np.int32)
    if k == 0:
        return indices[:0]
    count = _sift(x, k, np.int32(_guess(x, k)), indices, kept)
    if count < k:
        count = _sift(x, k, np.int32(0), indices, kept)
    _keep_largest(indices, kept, count, k)
    return indices[:k]
