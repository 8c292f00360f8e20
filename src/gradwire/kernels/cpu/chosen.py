"""Chosen elements into a payload and out of it, each in one call: places, rounding, error feedback.

For units of some ten thousand elements the calls between such steps took longer than the steps.
`shape` is what `gradwire.kernels.chosen.Shape.numbers` holds. Numba's cache notices changes of this file
alone, so whoever changes a kernel that is called from here touches it, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu import elias_fano
from gradwire.kernels.cpu.halves import narrow, widen
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.places import pack_bits, unpack_bits

LIST, BITMAP, CODED = 0, 1, 2
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
_CHUNK = 1024  # values; those of a chunk stay in the first-level cache between two loops
_SPARE = 10  # places that decoding may write beyond the last one: a block of the upper row


@kernel
def _ascend(indices: Any, numel: Any) -> Any:
    wrong = indices.size > 0 and (indices[0] < 0 or indices[-1] >= numel)
    for j in range(indices.size - 1):
        wrong |= indices[j + 1] <= indices[j]
    return not wrong


@kernel
def _pack(indices: Any, shape: Any, encoding: Any, packed: Any) -> None:
    """Write ascending places to uint32 `packed`."""
    form, words = shape[0], shape[3]
    if form == LIST:
        for j in range(words):
            packed[j] = indices[j]
        return
    if form == BITMAP:
        packed[:] = 0
        pack_bits(indices, packed.view(np.int32))
        return
    # A word more, because the last one is written before it is known whether there is anything in it.
    room, row = np.zeros(words + 1, np.uint32), np.zeros(shape[11], np.uint64)
    elias_fano.split(indices, shape[6], room, row)
    elias_fano.encode_blocks(row, shape[9], encoding, room[shape[7] :], room[shape[8] :])
    packed[:] = room[:words]


@kernel
def take_chosen(x: Any, indices: Any, shape: Any, encoding: Any, payload: Any) -> Any:
    """float32 x at `indices` into uint8 `payload`, and what that carries out of x.

    False, with x as it was, where they do not ascend within it.
    """
    count, words, start, kind = shape[1], shape[3], shape[4], shape[5]
    if not _ascend(indices, x.size):
        return False
    _pack(indices, shape, encoding, payload[: 4 * words].view(np.uint32))
    payload[4 * words : start] = 0
    size = 4 if kind == FLOAT32 else 2
    payload[start + size * count :] = 0
    sent = np.empty(_CHUNK, np.float32)
    for first in range(0, count, _CHUNK):
        here = indices[first : min(first + _CHUNK, count)]
        values = payload[start + size * first : start + size * (first + here.size)]
        for j in range(here.size):
            sent[j] = x[here[j]]
        if kind == FLOAT32:
            values.view(np.float32)[:] = sent[: here.size]
        else:
            narrow(sent[: here.size], kind == BFLOAT16, values.view(np.uint16))
            widen(values.view(np.uint16), kind == BFLOAT16, sent[: here.size])
        for j in range(here.size):
            x[here[j]] -= sent[j]
    return True


@kernel
def _unpack(packed: Any, shape: Any, decoding: Any, zeros_before: Any, counts: Any, out: Any) -> Any:
    """Write the places to int32 `out`, with room to spare; False for words that stand for no choice."""
    form, count, numel, words = shape[0], shape[1], shape[2], shape[3]
    indices = out[:count]
    if form == LIST:
        indices[:] = packed.view(np.int32)
        return _ascend(indices, numel)
    if form == BITMAP:
        found = unpack_bits(packed.view(np.int32), out[: count + 1])
        return found == count and (count == 0 or indices[-1] < numel)
    # Two words more, because windows are read two words at a time.
    room = np.zeros(words + 2, np.uint32)
    room[:words] = packed
    groups, places = room[shape[7] :], room[shape[8] :]
    found = elias_fano.decode_blocks(groups, places, shape[9], count, decoding, zeros_before, counts, out)
    if found != count or (count > 0 and not 0 <= indices[-1] <= shape[10]):
        return False
    return elias_fano.join(room, shape[6], indices) and _ascend(indices, numel)


@kernel
def add_chosen(
    payload: Any, shape: Any, decoding: Any, zeros_before: Any, counts: Any, weight: Any, out: Any
) -> Any:
    """Add weight · values of uint8 `payload` to float32 `out`; False, with `out` as it was, for no choice."""
    count, words, start, kind = shape[1], shape[3], shape[4], shape[5]
    indices = np.empty(count + _SPARE, np.int32)
    if not _unpack(payload[: 4 * words].view(np.uint32), shape, decoding, zeros_before, counts, indices):
        return False
    size = 4 if kind == FLOAT32 else 2
    room = np.empty(_CHUNK, np.float32)
    for first in range(0, count, _CHUNK):
        here = indices[first : min(first + _CHUNK, count)]
        values = payload[start + size * first : start + size * (first + here.size)]
        if kind == FLOAT32:
            room[: here.size] = values.view(np.float32)
        else:
            widen(values.view(np.uint16), kind == BFLOAT16, room[: here.size])
        for j in range(here.size):
            out[here[j]] += weight * room[j]
    return True
