"""Changes of 16-bit floats, coded by the exponents of the old numbers: one pass over the numbers to count,
two to encode, one to decode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import inlined, kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.payload import Sound
from gradwire.kernels.ulps import CLASSES, EVERY, MOST_ONES, NO_CHANGE, TILE, Halves

_ALL = (1 << 64) - 1
_ONES = np.array([next(bit for bit in range(9) if not each >> bit & 1) for each in range(256)], np.int64)
"""Ones at the lower end of a byte."""


def tally_changes(new: Tensor, old: Tensor, mantissa: int) -> Tensor:
    """Count as the contract says, in one pass."""
    table = torch.zeros(256, 17, dtype=torch.int64, device=old.device)
    _tally(new.numpy(), old.numpy(), mantissa, table.numpy())
    return table


def pack_runs(new: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Tensor:
    """Twin of `gradwire.kernels.ulps.pack_runs`. The gaps of what changes are found from the end."""
    room = np.zeros(
        2 * old.numel() + CLASSES + 2, np.uint64
    )  # a code has 52 bits at most, an element two codes
    numbers, parameters = (new.numpy(), old.numpy()), table.numpy()
    changing = int((numbers[0] != numbers[1]).sum())
    gaps = np.empty(changing, np.int32)
    used = _pack_runs(*numbers, halves.mantissa, _kinds(halves), parameters, gaps, room)
    return torch.from_numpy(room[: -(-used // 64)].view(np.int64))


def add_runs(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Twin of `gradwire.kernels.ulps.add_runs`. What lies after the last word reads as zeros."""
    padded = np.append(words.numpy().view(np.uint64), np.zeros(2, np.uint64))
    return bool(_add_runs(padded, old.numpy(), halves.mantissa, _kinds(halves), table.numpy()))


def pack_widths(new: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Tensor:
    """Twin of `gradwire.kernels.ulps.pack_widths`. Fields and lists are written side by side, then joined."""
    numel = old.numel()
    tiles = -(-numel // TILE)
    directory, fields = np.zeros(2 * tiles, np.int32), np.zeros(numel // 2 + tiles + 1, np.uint32)
    listed = np.empty(numel, np.uint32)
    numbers = new.numpy(), old.numpy()
    _pack_widths(*numbers, halves.mantissa, _kinds(halves), table.numpy(), directory, fields, listed)
    ends = directory[-2:].tolist() or [0, 0]
    parts = directory, fields[: ends[0]].view(np.int32), listed[: ends[1]].view(np.int32)
    return torch.from_numpy(np.concatenate([*parts, np.zeros(sum(ends) % 2, np.int32)]))


def add_widths(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Twin of `gradwire.kernels.ulps.add_widths`. What lies after the last word reads as zeros."""
    numbers = words.numpy().view(np.uint32)
    return bool(_add_widths(numbers, old.numpy(), halves.mantissa, _kinds(halves), table.numpy()))


def _kinds(halves: Halves) -> NDArray[np.uint8]:
    """Class by exponent."""
    return np.clip(halves.base - np.arange(256), 0, CLASSES - 1).astype(np.uint8)


@inlined
def _ascending(bits: Any) -> Any:
    """Integer that ascends with a float of these `bits` int16. Applied twice it changes nothing."""
    return np.int16(bits ^ ((bits >> np.int16(15)) & np.int16(0x7FFF)))


@inlined
def _change(new: Any, old: Any) -> Any:
    """Change of bits int16, 0 to 65535, as int64."""
    step = np.int64(np.int16(np.int64(_ascending(new)) - np.int64(_ascending(old))))
    return ((step << 1) ^ (step >> 63)) & 0xFFFF


@inlined
def _changed(old: Any, change: Any) -> Any:
    """New bits int16 of the bits `old`."""
    step = (change >> 1) ^ -(change & 1)
    return _ascending(np.int16(np.int64(_ascending(old)) + step))


@prepared("int16[::1], int16[::1], int64, int64[:, ::1]")
@kernel
def _tally(new: Any, old: Any, mantissa: Any, table: Any) -> None:
    """Count changes by exponent and by the bits that they need."""
    mask = (1 << (15 - mantissa)) - 1
    for i in range(old.size):
        exponent = (np.int64(old[i]) >> mantissa) & mask
        change = _change(new[i], old[i])
        needed = 0
        while change:
            change >>= 1
            needed += 1
        table[exponent, needed] += 1


@kernel
def _put(words: Any, place: Any, value: Any, parameter: Any) -> Any:
    """Write Rice's code of `value` from bit `place` on; returns the first bit after it."""
    ones = min(value >> parameter, MOST_ONES)
    if ones < MOST_ONES:
        bits = ((1 << ones) - 1) | (value & ((1 << parameter) - 1)) << (ones + 1)
        count = ones + 1 + parameter
    else:
        bits, count = ((1 << MOST_ONES) - 1) | value << MOST_ONES, MOST_ONES + 32
    word, shift = place >> 6, np.uint64(place & 63)
    words[word] |= np.uint64(bits) << shift
    if (place & 63) + count > 64:
        words[word + 1] |= np.uint64(bits) >> (np.uint64(64) - shift)
    return place + count


@prepared("int16[::1], int16[::1], int64, uint8[::1], uint8[::1], int32[::1], uint64[::1]")
@kernel
def _pack_runs(new: Any, old: Any, mantissa: Any, kinds: Any, table: Any, gaps: Any, words: Any) -> Any:
    """Write runs; returns the number of bits. `gaps` has room for one number for each that changes."""
    mask = (1 << (15 - mantissa)) - 1
    counts = np.zeros(CLASSES, np.int64)
    at = gaps.size
    for i in range(old.size - 1, -1, -1):
        kind = kinds[(np.int64(old[i]) >> mantissa) & mask]
        if new[i] != old[i]:
            at -= 1
            gaps[at] = counts[kind]
            counts[kind] = 0
        else:
            counts[kind] += 1
    place = 0
    for kind in range(CLASSES):
        if table[kind] >> 4 < NO_CHANGE:
            place = _put(words, place, counts[kind], np.int64(table[kind] >> 4))
    for i in range(old.size):
        is_changing = new[i] != old[i]
        kind = kinds[(np.int64(old[i]) >> mantissa) & mask]
        gap, parameter = np.int64(table[kind] >> 4), np.int64(table[kind] & 15)
        if gap == EVERY:
            place = _put(words, place, _change(new[i], old[i]), parameter)
        elif is_changing and gap < NO_CHANGE:
            place = _put(words, place, _change(new[i], old[i]) - 1, parameter)
            place = _put(words, place, np.int64(gaps[at]), gap)
        at += is_changing
    return place


@inlined
def _window(words: Any, place: Any) -> Any:
    """64 bits from bit `place` on, zeros after the end. The last two words are zeros."""
    word, shift = min(place >> 6, words.size - 2), np.uint64(place & 63)
    return words[word] >> shift | words[word + 1] << np.uint64(1) << (np.uint64(63) - shift)


@inlined
def _ones_of(bits: Any) -> Any:
    """Ones at the lower end of a window, up to 24."""
    ones = _ONES[bits & np.uint64(255)]
    if ones == 8:
        ones += _ONES[(bits >> np.uint64(8)) & np.uint64(255)]
        if ones == 16:
            ones += _ONES[(bits >> np.uint64(16)) & np.uint64(255)]
    return ones


@inlined
def _get(words: Any, place: Any, parameter: Any) -> Any:
    """Read Rice's code from bit `place` on; returns the number and the first bit after it."""
    bits = _window(words, place)
    ones = _ones_of(bits)
    if ones < MOST_ONES:
        rest = np.int64((bits >> np.uint64(ones + 1)) & np.uint64((1 << parameter) - 1))
        return ones << parameter | rest, place + ones + 1 + parameter
    rest = np.int64((bits >> np.uint64(MOST_ONES)) & np.uint64(0xFFFFFFFF))
    return rest, place + MOST_ONES + 32


@inlined
def _get_two(words: Any, place: Any, first: Any, second: Any) -> Any:
    """Read two of Rice's codes, one after the other. Short ones come from one window."""
    bits = _window(words, place)
    ones = _ONES[bits & np.uint64(255)]
    used = ones + 1 + first
    after = bits >> np.uint64(used)
    more = _ONES[after & np.uint64(255)]
    if ones < 8 and more < 8:  # at most 23 and 21 bits
        a = ones << first | np.int64((bits >> np.uint64(ones + 1)) & np.uint64((1 << first) - 1))
        b = more << second | np.int64((after >> np.uint64(more + 1)) & np.uint64((1 << second) - 1))
        return a, b, place + used + more + 1 + second
    a, place = _get(words, place, first)
    b, place = _get(words, place, second)
    return a, b, place


@prepared("uint64[::1], int16[::1], int64, uint8[::1], uint8[::1]")
@kernel
def _add_runs(words: Any, old: Any, mantissa: Any, kinds: Any, table: Any) -> Any:
    """Read runs, and change `old`; returns whether all bits were a code of so many numbers."""
    mask = (1 << (15 - mantissa)) - 1
    left, place = np.zeros(CLASSES, np.int64), np.int64(0)
    for kind in range(CLASSES):
        if table[kind] >> 4 < NO_CHANGE:
            left[kind], place = _get(words, place, np.int64(table[kind] >> 4))
        elif table[kind] >> 4 == NO_CHANGE:
            left[kind] = old.size
    is_sound = True
    for i in range(old.size):
        kind = kinds[(np.int64(old[i]) >> mantissa) & mask]
        if left[kind] > 0:
            left[kind] -= 1
            continue
        gap, parameter = np.int64(table[kind] >> 4), np.int64(table[kind] & 15)
        if gap == EVERY:
            change, place = _get(words, place, parameter)
        else:
            change, left[kind], place = _get_two(words, place, parameter, gap)
            change += 1
        is_sound &= change < 65536
        old[i] = _changed(old[i], change)
    for kind in range(CLASSES):
        is_sound &= table[kind] >> 4 == NO_CHANGE or left[kind] == 0
    is_sound &= (place + 63) >> 6 == words.size - 2
    return is_sound and (place & 63 == 0 or words[place >> 6] >> np.uint64(place & 63) == 0)


@prepared("int16[::1], int16[::1], int64, uint8[::1], uint8[::1], int32[::1], uint32[::1], uint32[::1]")
@kernel
def _pack_widths(
    new: Any, old: Any, mantissa: Any, kinds: Any, table: Any, directory: Any, fields: Any, listed: Any
) -> None:
    """Write fields, lists, and where those of each tile end."""
    mask = (1 << (15 - mantissa)) - 1
    word: Any = 0
    count = 0
    for tile in range(directory.size // 2):
        place = word * 32
        for i in range(tile * TILE, min(tile * TILE + TILE, old.size)):
            width = np.int64(table[kinds[(np.int64(old[i]) >> mantissa) & mask]])
            change = _change(new[i], old[i])
            if change >> width:
                listed[count] = np.uint32((i - tile * TILE) | change << 16)
                count += 1
            else:
                bits, shift = change << (place & 31), place >> 5
                fields[shift] |= np.uint32(bits & 0xFFFFFFFF)
                fields[shift + 1] |= np.uint32(bits >> 32)
            place += width
        word = (place + 31) >> 5
        directory[2 * tile], directory[2 * tile + 1] = word, count


@prepared("uint32[::1], int16[::1], int64, uint8[::1], uint8[::1]")
@kernel
def _add_widths(words: Any, old: Any, mantissa: Any, kinds: Any, table: Any) -> Any:
    """Read fields and lists, and change `old`; returns whether all words were a code of so many numbers."""
    mask = (1 << (15 - mantissa)) - 1
    tiles = (old.size + TILE - 1) // TILE
    if words.size < 2 * tiles:
        return False
    word: Any = np.int64(2 * tiles)
    item, end = np.int64(0), np.int64(0)
    if tiles:
        item = np.int64(words[2 * tiles - 2]) + 2 * tiles
        end = item + np.int64(words[2 * tiles - 1])
    if words.size != end + (end & 1) or (end & 1 and words[end]):
        return False
    first, lists = word, item
    is_sound: Any = True
    for tile in range(tiles):
        begin, stop = tile * TILE, min(tile * TILE + TILE, old.size)
        place, last = word * 32, lists + np.int64(words[2 * tile + 1])
        if last < item or last > end:
            return False
        next_one = np.int64(words[item] & 0xFFFF) if item < last else np.int64(TILE)
        for i in range(begin, stop):
            width = np.int64(table[kinds[(np.int64(old[i]) >> mantissa) & mask]])
            if i - begin == next_one:
                change = np.int64(words[item] >> 16)
                item += 1
                following = np.int64(words[item] & 0xFFFF) if item < last else np.int64(TILE)
                is_sound &= following > next_one
                next_one = following
                old[i] = _changed(old[i], change)
            elif width:
                at = place >> 5
                if at >= lists:
                    return False
                bits = np.int64(words[at])
                if at + 1 < lists:
                    bits |= np.int64(words[at + 1]) << 32
                change = (bits >> (place & 31)) & ((1 << width) - 1)
                if change:
                    old[i] = _changed(old[i], change)
            place += width
        word = (place + 31) >> 5
        is_sound &= word - first == np.int64(words[2 * tile]) and item == last
    return is_sound and word == lists and item == end
