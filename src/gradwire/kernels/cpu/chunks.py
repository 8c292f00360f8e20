"""Largest elements of each chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import chunks as contracts
from gradwire.kernels.cpu.bits import INFINITY, MAGNITUDE, magnitude
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.cpu.threshold import largest_bits

_LAST = 0x7FFFFFFF  # a key holds a row in 31 bits
_TILE = 1024  # chunks at a time: what is known of them stays in the first-level cache


def chunk_topk_indices(x: Tensor, chunks: int, keep: int) -> Tensor:
    """Twin of `gradwire.kernels.chunks.chunk_topk_indices`. Select in all strided chunks of a tile side by
    side, row by row: neighbours in memory are of neighbouring chunks.
    """
    if x.numel() // chunks > _LAST:
        return contracts.chunk_topk_indices.plain(x, chunks, keep)
    found = np.empty(contracts.chunk_topk_count(x.numel(), chunks, keep), np.int64)
    select = _chunk_maxima if keep == 1 else _chunk_topk
    select(x.numpy().view(np.int32), chunks, keep, found)
    return torch.from_numpy(found)


def indices_near_maxima(x: Tensor, ahead: Tensor, chunk: int) -> Tensor:
    """Twin of `gradwire.kernels.chunks.indices_near_maxima`. Find the maximum of each chunk in a first pass,
    and compare in a second one, for which the chunk is in the cache.
    """
    # Pages of the buffer that are not written to take no memory.
    found = np.empty(x.numel() + 1, np.int64)
    count = _indices_near_maxima(x.numpy().view(np.int32), ahead.numpy().view(np.int32), chunk, found)
    return torch.from_numpy(found[:count])


@prepared("int32[::1], int64, int64, int64[::1]")
@kernel
def _chunk_maxima(bits: Any, chunks: Any, keep: Any, out: Any) -> None:
    """Write to int64 `out` the index of the largest element of each of `chunks` chunks; `bits` are those of
    float32, as int32. `keep` is 1; it is there so that `_chunk_topk` can be swapped in.
    """
    count = min(chunks, bits.size)
    row_of, largest = np.zeros(count, np.int32), np.empty(_TILE, np.int32)
    for first in range(0, count, _TILE):
        rows = row_of[first : first + _TILE]
        largest[:] = -1
        for row, start in enumerate(range(first, bits.size, chunks)):
            here = bits[start : start + rows.size]
            for j in range(here.size):
                own = magnitude(here[j])
                rows[j] = row if own > largest[j] else rows[j]
                largest[j] = max(own, largest[j])
    _by_row(row_of, chunks, keep, bits.size, out)


@prepared("int32[::1], int64, int64, int64[::1]")
@kernel
def _chunk_topk(bits: Any, chunks: Any, keep: Any, out: Any) -> None:
    """Write to int64 `out` the indices of the `keep` largest elements of each of `chunks` chunks, or of all,
    if it has fewer; `bits` are those of float32, as int32.

    Magnitude and row are combined into one integer, which orders by magnitude, then by lowest row.
    """
    count = min(chunks, bits.size)
    row_of, keys, least = (
        np.empty(count * keep, np.int32),
        np.empty((_TILE, keep), np.int64),
        np.empty(_TILE, np.int64),
    )
    for first in range(0, count, _TILE):
        width = min(_TILE, count - first)
        keys[:], least[:] = -1, 0
        for row, start in enumerate(range(first, bits.size, chunks)):
            here = bits[start : start + width]
            for j in range(here.size):
                key = (np.int64(magnitude(here[j])) << 32) | (_LAST - row)
                if key > keys[j, least[j]]:
                    keys[j, least[j]] = key
                    least[j] = keys[j].argmin()
        for j in range(width):
            for i in range(keep):
                row_of[(first + j) * keep + i] = -1 if keys[j, i] < 0 else _LAST - (keys[j, i] & _LAST)
    _by_row(row_of, chunks, keep, bits.size, out)


@kernel
def _by_row(row_of: Any, chunks: Any, keep: Any, numel: Any, out: Any) -> None:
    """Write the indices of the selected elements in ascending order.

    Args:
        row_of: row of each of `keep` elements per chunk, chunk by chunk; -1 for none.
        chunks, keep, numel: number of chunks, elements selected per chunk, elements of the tensor.
        out: int64, written.
    """
    place = np.zeros(numel // chunks + 2, np.int64)
    for row in row_of:
        place[row + 1] += row >= 0
    place = place.cumsum()
    for i in range(row_of.size):
        row = row_of[i]
        if row >= 0:
            out[place[row]] = row * chunks + i // keep
            place[row] += 1


@prepared("int32[::1], int32[::1], int64, int64[::1]")
@kernel
def _indices_near_maxima(bits: Any, ahead: Any, chunk: Any, out: Any) -> Any:
    """Write to int64 `out` the indices where |ahead| or |x| reaches the largest |x| of a chunk of `chunk`
    neighbours, and x is not 0. `bits` and `ahead` are the bits of float32, as int32. Returns the number of
    indices.
    """
    count = 0
    for start in range(0, bits.size, chunk):
        stop = min(start + chunk, bits.size)
        threshold = max(min(largest_bits(bits[start:stop]), INFINITY), np.int32(1))
        for i in range(start, stop):
            own = bits[i] & MAGNITUDE
            out[count] = i
            count += (own >= threshold) | (((ahead[i] & MAGNITUDE) >= threshold) & (own > 0))
    return count
