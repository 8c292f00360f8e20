"""Payloads of chosen elements, encoded or decoded in one call: places, rounding, error feedback.

For units of some ten thousand elements, calls between such steps took longer than the steps. Kernels get a
payload's layout as `gradwire.kernels.payload.Shape.numbers`, and Elias and Fano's planes
(`gradwire.kernels.payload`) as tables. Tables are arguments, because Numba would freeze globals of other
files into its cache. Numbers are unsigned, so that no index is tested for being negative.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import chosen as contracts
from gradwire.kernels.cpu.halves import narrow, widen
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.places import find_bits, set_bits
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.payload import (
    BLOCK,
    COUNTS,
    DECODING,
    ENCODING,
    ZEROS_BEFORE,
    Planes,
    Shape,
    Sound,
    marked,
)
from gradwire.kernels.places import index_type

LIST, BITMAP, CODED = 0, 1, 2
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
_CHUNK = 1024  # values; those of a chunk stay in the first-level cache between two loops
_SPARE = 10  # places that decoding may write beyond the last one: a block of the upper row
_U = np.uint64
_0, _1, _5, _6, _9, _10, _11, _31, _32, _63 = (_U(number) for number in (0, 1, 5, 6, 9, 10, 11, 31, 32, 63))
_PLACES = 2048  # indices; those of a chunk stay in the first-level cache between two loops


def take_chosen(x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """Twin of `gradwire.kernels.chosen.take_chosen`. Encode in one call: values are read, rounded, written
    and subtracted a thousand at a time.
    """
    if not shape.is_narrow:
        return contracts.take_chosen.plain(x, indices, shape)
    payload = torch.empty(shape.bytes, dtype=torch.uint8, device="cpu")
    if not _take_chosen(x.numpy(), indices.numpy(), shape.numbers, ENCODING, payload.numpy()):
        raise ValueError(f"indices must ascend within 0 … {shape.planes.numel - 1}, without repeats")
    return payload


def add_chosen(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> Sound:
    """Twin of `gradwire.kernels.chosen.add_chosen`. Decode all places, then add the values, a thousand at a
    time.
    """
    if not shape.is_narrow:
        return contracts.add_chosen.plain(payload, shape, out, weight)
    tables = DECODING, ZEROS_BEFORE, COUNTS
    added: bool = _add_chosen(payload.numpy(), shape.numbers, *tables, np.float32(weight), out.numpy())
    return added


def average_chosen(
    payloads: Tensor, shape: Shape, out: Tensor, weight: float, mark: Tensor | None = None
) -> Tensor | Literal[True]:
    """Twin of `gradwire.kernels.chosen.average_chosen`. Decode one payload after the other."""
    if not shape.is_narrow:
        return contracts.average_chosen.plain(payloads, shape, out, weight, mark)
    out.zero_()
    mean, rule = out.numpy(), (shape.numbers, DECODING, ZEROS_BEFORE, COUNTS, np.float32(weight))
    sound = True
    for payload in payloads.numpy():
        sound &= _add_chosen(payload, *rule, mean) or not payload[: 4 * shape.words].any()
    return True if sound else marked(torch.tensor(False, device="cpu"), mark)


def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Twin of `gradwire.kernels.chosen.pack_elias_fano`. Pack in one call; each word is assembled in a
    register.
    """
    words = np.zeros(planes.words + 1, np.uint32)
    row = np.zeros(planes.row // 64 + 2, np.uint64)
    low, groups, places = (words[start:] for start in planes.starts)
    if not _split(indices.numpy(), planes.low_bits, low, row):
        raise ValueError(f"indices must ascend within 0 … {planes.numel - 1}, without repeats")
    _encode_blocks(row, planes.blocks, ENCODING, groups, places)
    return torch.from_numpy(words[:-1].view(np.int32))


def unpack_elias_fano(packed: Tensor, planes: Planes, mark: Tensor | None = None) -> tuple[Tensor, Sound]:
    """Twin of `gradwire.kernels.chosen.unpack_elias_fano`. Unpack the upper parts block by block, then join
    the low bits.
    """
    # Kernels read two words at a time, and write a block's ones before they know how many there are.
    words = np.zeros(planes.words + 2, np.uint32)
    words[:-2] = packed.numpy().view(np.uint32)
    indices = torch.empty(planes.count + BLOCK, dtype=index_type(planes.numel), device=packed.device)
    out = indices.numpy()
    low, groups, places = (words[start:] for start in planes.starts)
    tables = DECODING, ZEROS_BEFORE, COUNTS
    found = _decode_blocks(groups, places, planes.blocks, planes.count, *tables, out)
    indices, out = indices[: planes.count], out[: planes.count]
    sound = found == planes.count and (found == 0 or 0 <= out[-1] <= planes.top)
    sound = sound and _join(low, planes.low_bits, out)
    if sound and (found == 0 or 0 <= out[0] <= out[-1] < planes.numel):
        return indices, True
    replaced = torch.arange(planes.count, dtype=indices.dtype, device="cpu")
    return replaced, marked(not packed.any(), mark)


@prepared(
    "int32[::1], int64, uint32[::1], uint64[::1]",
    "int64[::1], int64, uint32[::1], uint64[::1]",
)
@kernel
def _split(indices: Any, low_bits: Any, low: Any, row: Any) -> Any:
    """Split ascending indices into low bits (uint32 `low`) and the upper row (uint64 `row`, zeroed before).

    Returns False if a one would lie outside of `row`. Each word is assembled in a register, because setting
    bits in memory waits for the previous store.
    """
    b = _U(low_bits)
    mask = (_1 << b) - _1
    ones, word = _0, _0
    bits, filled, out = _0, _0, _0
    for j in range(_U(indices.size)):
        v = _U(indices[j]) - _U(j)
        place = (v >> b) + _U(j)
        if place >> _6 != word:
            row[word] = ones
            ones = _0
            if place >> _6 < word or place >> _6 >= _U(row.size):
                return False
            word = place >> _6
        ones |= _1 << (place & _63)
        bits |= (v & mask) << filled
        filled += b
        if filled >= _32:
            low[out] = np.uint32(bits)
            bits >>= _32
            filled -= _32
            out += _1
    if indices.size > 0:
        row[word] = ones
    if filled > _0:
        low[out] = np.uint32(bits)
    return True


@prepared("uint64[::1], int64, uint16[::1], uint32[::1], uint32[::1]")
@kernel
def _encode_blocks(row: Any, blocks: Any, encoding: Any, groups: Any, places: Any) -> None:
    """Block-code the upper row.

    Args:
        row: uint64, the bits of the row.
        blocks: number of blocks of ten bits in `row`.
        encoding: the table `ENCODING`.
        groups, places: uint32, written: groups' numbers and places in the group, each with a spare word.
    """
    group_bits, group_filled, group = _0, _0, _0
    place_bits, place_filled, place = _0, _0, _0
    for i in range(_U(blocks)):
        bit = _10 * _U(i)
        shift = bit & _63
        # Two shifts to the left, because one by 64 is undefined.
        window = (row[bit >> _6] >> shift) | ((row[(bit >> _6) + _1] << _1) << (_63 - shift))
        code = _U(encoding[window & _U(1023)])
        group_bits |= (code & _63) << group_filled
        group_filled += _6
        if group_filled >= _32:
            groups[group] = np.uint32(group_bits)
            group_bits >>= _32
            group_filled -= _32
            group += _1
        place_bits |= (code >> _9) << place_filled
        place_filled += (code >> _6) & _U(7)
        # Always written, advanced when full: whether 0 to 7 bits fill a word cannot be predicted.
        places[place] = np.uint32(place_bits)
        full = place_filled >> _5
        place_bits >>= full << _5
        place_filled &= _31
        place += full
    if group_filled > _0:
        groups[group] = np.uint32(group_bits)
    if place_filled > _0:
        places[place] = np.uint32(place_bits)


@kernel
def _window(words: Any, bit: Any) -> Any:
    """At least 33 bits of uint32 `words`, from bit number `bit` on."""
    word = bit >> _5
    return (_U(words[word]) | _U(words[word + _1]) << _32) >> (bit & _31)


@prepared(
    "uint32[::1], uint32[::1], int64, int64, uint16[::1], int8[:, ::1], uint8[::1], int32[::1]",
    "uint32[::1], uint32[::1], int64, int64, uint16[::1], int8[:, ::1], uint8[::1], int64[::1]",
)
@kernel
def _decode_blocks(
    groups: Any, places: Any, blocks: Any, count: Any, decoding: Any, zeros_before: Any, counts: Any, out: Any
) -> Any:
    """Decode the block-coded upper row into the upper parts of indices.

    An upper part is the number of zeros before the index's one. Six are written per block, valid or not,
    because a branch on their number would be mispredicted at every other block.

    Args:
        groups, places: uint32, groups' numbers and places in the group.
        blocks: number of blocks.
        count: number of indices.
        decoding, zeros_before, counts: the tables `DECODING`, `ZEROS_BEFORE` and `COUNTS`.
        out: (count + 10 or more,), written.

    Returns the number of upper parts, or -1 if a block is invalid.
    """
    bit, number, farthest = _0, _0, _0
    zeros = np.int64(0)
    most = _U(count)
    for i in range(_U(blocks)):
        entry = _U(decoding[_window(groups, _6 * _U(i)) & _63])
        width = entry >> _11
        position = (entry & _U(2047)) + (_window(places, bit) & ((_1 << width) - _1))
        bit += width
        if bit > most or number > most:
            return -1
        farthest = max(farthest, position)
        for k in range(_6):
            out[number + k] = zeros + zeros_before[position, k]
        ones = _U(counts[position])
        if ones > _6:
            for k in range(_6, _10):
                out[number + k] = zeros + zeros_before[position, k]
        number += ones
        zeros += np.int64(_10 - ones)
    return -1 if farthest >= _U(1024) else np.int64(number)


@kernel
def _join_chunk(low: Any, b: Any, out: Any, start: Any, stop: Any) -> None:
    mask = (_1 << b) - _1
    shift = np.int64(b)
    for j in range(_U(start), _U(stop)):
        below = np.int64(_window(low, _U(j) * b) & mask)
        out[j] = (np.int64(out[j]) << shift | below) + np.int64(j)


@kernel
def _rises(out: Any) -> Any:
    wrong = False
    for j in range(out.size - 1):
        wrong |= out[j + 1] <= out[j]
    return not wrong


@prepared(
    "uint32[::1], int64, int32[::1]",
    "uint32[::1], int64, int64[::1]",
)
@kernel
def _join(low: Any, low_bits: Any, out: Any) -> Any:
    """Join the upper parts in `out` with the low bits to indices, in place; returns whether they ascend."""
    good = True
    for start in range(0, out.size, _PLACES):
        stop = min(start + _PLACES, out.size)
        _join_chunk(low, _U(low_bits), out, start, stop)
        good &= _rises(out[max(start - 1, 0) : stop])
    return good


@kernel
def _ascend(indices: Any, numel: Any) -> Any:
    wrong = indices.size > 0 and (indices[0] < 0 or indices[-1] >= numel)
    for j in range(indices.size - 1):
        wrong |= indices[j + 1] <= indices[j]
    return not wrong


@kernel
def _pack(indices: Any, shape: Any, encoding: Any, packed: Any) -> None:
    """Pack ascending indices into uint32 `packed`, in the form that `shape` names."""
    form, words = shape[0], shape[3]
    if form == LIST:
        for j in range(words):
            packed[j] = indices[j]
        return
    if form == BITMAP:
        packed[:] = 0
        set_bits(indices, packed.view(np.int32))
        return
    # A word more, because the last one is written before it is known whether there is anything in it.
    room, row = np.zeros(words + 1, np.uint32), np.zeros(shape[11], np.uint64)
    _split(indices, shape[6], room, row)
    _encode_blocks(row, shape[9], encoding, room[shape[7] :], room[shape[8] :])
    packed[:] = room[:words]


@prepared(
    "float32[::1], int32[::1], int64[::1], uint16[::1], uint8[::1]",
    "float32[::1], int64[::1], int64[::1], uint16[::1], uint8[::1]",
)
@kernel
def _take_chosen(x: Any, indices: Any, shape: Any, encoding: Any, payload: Any) -> Any:
    """Encode float32 x at `indices` into uint8 `payload`; x keeps the rounding errors there.

    `shape` are the numbers of the layout (`Shape.numbers`), and `encoding` is the table of the block code.
    Returns False, and changes nothing, if the indices do not ascend within x.
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
    """Unpack the indices of a payload.

    Args:
        packed: uint32, the packed indices.
        shape: int64, numbers of the payload's layout.
        decoding, zeros_before, counts: tables of patterns.
        out: int32, written: count indices, ascending; it has `_SPARE` entries more.

    Returns False if the words are not count ascending indices below numel.
    """
    form, count, numel, words = shape[0], shape[1], shape[2], shape[3]
    indices = out[:count]
    if form == LIST:
        indices[:] = packed.view(np.int32)
        return _ascend(indices, numel)
    if form == BITMAP:
        found = find_bits(packed.view(np.int32), out[: count + 1])
        return found == count and (count == 0 or indices[-1] < numel)
    # Two words more, because windows are read two words at a time.
    room = np.zeros(words + 2, np.uint32)
    room[:words] = packed
    groups, places = room[shape[7] :], room[shape[8] :]
    found = _decode_blocks(groups, places, shape[9], count, decoding, zeros_before, counts, out)
    if found != count or (count > 0 and not 0 <= indices[-1] <= shape[10]):
        return False
    return _join(room, shape[6], indices) and _ascend(indices, numel)


@prepared("uint8[::1], int64[::1], uint16[::1], int8[:, ::1], uint8[::1], float32, float32[::1]")
@kernel
def _add_chosen(
    payload: Any, shape: Any, decoding: Any, zeros_before: Any, counts: Any, weight: Any, out: Any
) -> Any:
    """Add the values of a payload to `out` at their indices.

    Args:
        payload: uint8: packed indices, then values.
        shape: int64, numbers of the payload's layout.
        decoding, zeros_before, counts: tables for unpacking indices, as in `_unpack`.
        weight: factor of the values.
        out: float32 (numel,), updated.

    Returns False, and leaves `out` as it was, if the indices are invalid.
    """
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
