"""Indices into the planes of `gradwire.kernels.elias_fano`, and back.

Tables are arguments and not globals: Numba would freeze globals into its cache, which does not notice when
another file has changed. Numbers are unsigned, so that no index is tested for being negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel

_U = np.uint64
_0, _1, _5, _6, _9, _10, _11, _31, _32, _63 = (_U(number) for number in (0, 1, 5, 6, 9, 10, 11, 31, 32, 63))
_CHUNK = 2048  # indices; those of a chunk stay in the first-level cache between two loops


@kernel
def split(indices: Any, low_bits: Any, low: Any, row: Any) -> Any:
    """Low bits into uint32 `low`, ones into zeroed uint64 `row`; False where that would leave `row`.

    Each word is put together in a register: setting bits in memory waits for the store before.
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


@kernel
def encode_blocks(row: Any, blocks: Any, encoding: Any, groups: Any, places: Any) -> None:
    """Code `blocks` of uint64 `row` into uint32 `groups` and `places`, each with a spare word."""
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
    """At least 33 bits from `bit` on."""
    word = bit >> _5
    return (_U(words[word]) | _U(words[word + _1]) << _32) >> (bit & _31)


@kernel
def decode_blocks(
    groups: Any, places: Any, blocks: Any, count: Any, decoding: Any, zeros_before: Any, counts: Any, out: Any
) -> Any:
    """Write the upper parts to `out` (count + 10 or more); returns how many, or -1 for what no block means.

    The upper part of an index is the number of zeros before its one. Six are written per block whether there
    are so many or not, because a branch on their number would be mispredicted at every other block.
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
def _ascends(out: Any) -> Any:
    wrong = False
    for j in range(out.size - 1):
        wrong |= out[j + 1] <= out[j]
    return not wrong


@kernel
def join(low: Any, low_bits: Any, out: Any) -> Any:
    """Make indices of the upper parts in `out`, with the low bits; returns whether they ascend."""
    good = True
    for start in range(0, out.size, _CHUNK):
        stop = min(start + _CHUNK, out.size)
        _join_chunk(low, _U(low_bits), out, start, stop)
        good &= _ascends(out[max(start - 1, 0) : stop])
    return good
