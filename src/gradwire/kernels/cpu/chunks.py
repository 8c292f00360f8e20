"""The largest elements of each chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.bits import INFINITY, MAGNITUDE
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.cpu.threshold import largest_bits
from gradwire.kernels.dispatch import DECLINED, Declined, is_fast

_PLACES = 0x7FFFFFFF
_LONGEST_CHUNK = 2**31  # a key holds a place within the chunk in 31 bits


def chunk_topk_indices(x: Tensor, chunk: int, keep: int) -> Tensor | Declined:
    """Magnitude and place are one integer, which a maximum can compare."""
    if not is_fast(x) or chunk > _LONGEST_CHUNK:
        return DECLINED
    full, rest = divmod(x.numel(), chunk)
    found = np.empty(full * keep + min(keep, rest), np.int64)
    select = _chunk_maxima if keep == 1 else _chunk_topk
    select(x.numpy().view(np.int32), chunk, keep, found)
    return torch.from_numpy(found)


def indices_near_maxima(x: Tensor, ahead: Tensor, chunk: int) -> Tensor | Declined:
    """Two passes over each chunk, which is in the cache for the second."""
    if not is_fast(x, ahead):
        return DECLINED
    # Pages of the buffer that are not written to take no memory.
    found = np.empty(x.numel() + 1, np.int64)
    count = _indices_near_maxima(x.numpy().view(np.int32), ahead.numpy().view(np.int32), chunk, found)
    return torch.from_numpy(found[:count])


@kernel
def _key(bits: Any, place: Any) -> Any:
    """Orders by magnitude, then by the lowest place: one integer, so that a maximum vectorises."""
    return (np.int64(min(np.int32(bits & MAGNITUDE), INFINITY)) << 32) | (_PLACES - place)


@kernel
def _place(key: Any) -> Any:
    return _PLACES - (key & _PLACES)


@kernel
def _largest_key(bits: Any) -> Any:
    largest = np.int64(-1)
    for i in range(bits.size):
        largest = max(largest, _key(bits[i], i))
    return largest


@prepared("int32[::1], int64, int64, int64[::1]")
@kernel
def _chunk_maxima(bits: Any, chunk: Any, keep: Any, out: Any) -> None:
    """The index of the largest of each chunk; `keep` is 1, named so that it is called like `_chunk_topk`."""
    for number in range(out.size):
        start = number * chunk
        out[number] = start + _place(_largest_key(bits[start : start + chunk]))


@kernel
def _keep_largest(bits: Any, keys: Any) -> None:
    """Fill `keys` with the largest keys of `bits`, which has as many elements or more."""
    for i in range(keys.size):
        keys[i] = _key(bits[i], i)
    smallest = keys.argmin()
    for i in range(keys.size, bits.size):
        key = _key(bits[i], i)
        if key > keys[smallest]:
            keys[smallest] = key
            smallest = keys.argmin()


@prepared("int32[::1], int64, int64, int64[::1]")
@kernel
def _chunk_topk(bits: Any, chunk: Any, keep: Any, out: Any) -> None:
    """The indices of the `keep` largest of each chunk; of the last as many as there are."""
    buffer = np.empty(keep, np.int64)
    for start in range(0, bits.size, chunk):
        here = bits[start : start + chunk]
        keys = buffer[: min(keep, here.size)]
        _keep_largest(here, keys)
        for j in range(keys.size):
            keys[j] = start + _place(keys[j])
        keys.sort()
        first = start // chunk * keep
        out[first : first + keys.size] = keys


@prepared("int32[::1], int32[::1], int64, int64[::1]")
@kernel
def _indices_near_maxima(bits: Any, ahead: Any, chunk: Any, out: Any) -> Any:
    """Write the indices where |ahead| or |x| reaches the chunk's largest |x| > 0; returns how many."""
    count = 0
    for start in range(0, bits.size, chunk):
        stop = min(start + chunk, bits.size)
        threshold = max(min(largest_bits(bits[start:stop]), INFINITY), np.int32(1))
        for i in range(start, stop):
            own = bits[i] & MAGNITUDE
            out[count] = i
            count += (own >= threshold) | (((ahead[i] & MAGNITUDE) >= threshold) & (own > 0))
    return count
