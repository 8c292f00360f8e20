"""Changes of 16-bit floats, coded by the exponents of the old numbers: one pass over the numbers to count,
one or two to encode, one to decode.

States are decoded in blocks of 1024 numbers: a loop finds where the table of each number's class begins, one
follows the states, and one applies the changes. The first and the last of them are vectorised.
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
from gradwire.kernels.ulps import (
    CLASSES,
    EVERY,
    LEVELS,
    MOST_ONES,
    NO_CHANGE,
    SPREAD,
    STATE_BITS,
    STREAMS,
    SYMBOLS,
    TILE,
    Halves,
    listed_symbols,
    shares_of,
    symbols_of,
)

_ALL = (1 << 64) - 1
_ONES = np.array([next(bit for bit in range(9) if not each >> bit & 1) for each in range(256)], np.int64)
"""Ones at the lower end of a byte."""
_SYMBOL = symbols_of(torch.arange(1 << 16, device="cpu"))[0].numpy().astype(np.uint8)
"""Symbol of each change."""
_SPARED = np.array([max(0, symbol // 4 - 1) for symbol in range(SYMBOLS)])
_UPPER = np.array([symbol if symbol < 4 else 4 + symbol % 4 for symbol in range(SYMBOLS)])
"""Number of a symbol's low bits, and what stands above them."""
_LENGTH = np.array([each.bit_length() for each in range(2 << STATE_BITS)], np.uint8)
_STATES, _SKIPPED = 1 << STATE_BITS, STREAMS * STATE_BITS
_BLOCK = 1024


def tally_changes(new: Tensor, old: Tensor, mantissa: int) -> Tensor:
    """Count as the contract says, in one pass."""
    table = torch.zeros(256, SYMBOLS, dtype=torch.int64, device=old.device)
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


def pack_states(new: Tensor, old: Tensor, halves: Halves, weights: Tensor) -> Tensor:
    """Twin of `gradwire.kernels.ulps.pack_states`. The stream is written from its end to its beginning."""
    table = listed_symbols(weights.numpy())
    shares = shares_of(weights.numpy())
    shares[table == 0] = 0
    shares[table == 0, 0] = _STATES
    # A change takes at most a state's bits and 13 of its own. A symbol takes two numbers of the head at most.
    room = np.zeros(-(-(STATE_BITS + 14) * old.numel() // 32) + 2, np.uint32)
    head = np.zeros(1 + -(-12 * CLASSES * SYMBOLS // 64), np.uint64)
    numbers = new.numpy(), old.numpy()
    head_words, first = _pack_states(
        *numbers, halves.mantissa, _kinds(halves), weights.numpy(), table, shares, head, room
    )
    parts = head[:head_words].view(np.int64), room[first:].view(np.int64)
    return torch.from_numpy(np.concatenate(parts))


def add_states(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Twin of `gradwire.kernels.ulps.add_states`. What lies after the last word reads as zeros."""
    padded = np.append(words.numpy().view(np.uint64), np.zeros(1, np.uint64))
    data, numbers = padded.view(np.uint8), old.numpy()
    return bool(_add_states(padded, data, numbers, halves.mantissa, halves.base, table.numpy()))


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
    """Count changes by exponent and by symbol."""
    mask = (1 << (15 - mantissa)) - 1
    for i in range(old.size):
        table[(np.int64(old[i]) >> mantissa) & mask, _SYMBOL[_change(new[i], old[i])]] += 1


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


@kernel
def _spread(shares: Any, symbols: Any) -> None:
    """Give the states to `symbols`, as many to each as its share."""
    at = 0
    for symbol in range(SYMBOLS):
        for _ in range(shares[symbol]):
            symbols[at] = symbol
            at = (at + SPREAD) & (_STATES - 1)


@prepared(
    "int16[::1], int16[::1], int64, uint8[::1], uint8[:, ::1], uint8[::1], int64[:, ::1], uint64[::1], "
    "uint32[::1]"
)
@kernel
def _pack_states(
    new: Any, old: Any, mantissa: Any, kinds: Any, weights: Any, table: Any, shares: Any, head: Any,
    words: Any,
) -> Any:  # fmt: skip
    """Write `head`, and the stream at the end of `words`; returns the words of one and the first of the
    other.

    A state x, from the number of all states on, has its upper bits in the symbol's share. `steps` gives for
    a symbol what to add to x, so that the number of its lower bits is in the upper half; and where the
    states of that symbol are, less its share.
    """
    symbols = np.zeros(_STATES, np.uint8)
    steps = np.zeros((CLASSES, SYMBOLS, 2), np.int64)
    states = np.zeros((CLASSES + 1) << STATE_BITS, np.uint16)  # more, if a symbol without a weight occurs
    place: Any = np.int64(64)
    for number in range(CLASSES):
        _spread(shares[number], symbols)
        ends = np.zeros(SYMBOLS, np.int64)
        end: Any = np.int64(number << STATE_BITS)
        for each in range(SYMBOLS):
            share = shares[number, each]
            most = STATE_BITS + 1 - np.int64(_LENGTH[share])
            steps[number, each, 0] = (most << 16) - (share << most)
            steps[number, each, 1] = end - share
            ends[each] = end
            end += share
        for state in range(_STATES):
            states[ends[symbols[state]]] = _STATES + state
            ends[symbols[state]] += 1
        zeros = -1
        for each in range(table[number]):
            weight = np.uint64(weights[number, each])
            if zeros < 0 or weight:
                if zeros >= 0:
                    place = _put_six(head, place, np.uint64(zeros))
                place = _put_six(head, place, weight)
                zeros = -1 if weight else 0
            else:
                zeros += 1
    turns = np.full(STREAMS, _STATES, np.int64)
    mask = (1 << (15 - mantissa)) - 1
    kept, count, first = np.uint64(0), np.int64(0), words.size
    for i in range(old.size - 1, -1, -1):
        kind = np.int64(kinds[(np.int64(old[i]) >> mantissa) & mask])
        change = _change(new[i], old[i])
        symbol = np.int64(_SYMBOL[change])
        state, spared = turns[i & (STREAMS - 1)], _SPARED[symbol]
        bits = (state + steps[kind, symbol, 0]) >> 16
        turns[i & (STREAMS - 1)] = states[(state >> bits) + steps[kind, symbol, 1]]
        low = (state & ((1 << bits) - 1)) | (change & ((1 << spared) - 1)) << bits
        kept = kept << np.uint64(bits + spared) | np.uint64(low)
        count += bits + spared
        if count >= 32:
            count -= 32
            first -= 1
            words[first] = np.uint32(kept >> np.uint64(count))
    skipped = np.int64(0)
    if count:
        first -= 1
        skipped = 32 - count
        words[first] = np.uint32(kept << np.uint64(skipped))
    if (words.size - first) & 1:
        first -= 1
        skipped += 32
    for i in range(STREAMS):
        head[0] |= np.uint64(turns[i] - _STATES) << np.uint64(i * STATE_BITS)
    head[0] |= np.uint64(skipped) << np.uint64(_SKIPPED)
    return (place + 63) >> 6, first


@inlined
def _put_six(words: Any, place: Any, value: Any) -> Any:
    """Write 6 bits from bit `place` on; returns the first bit after them."""
    words[place >> 6] |= value << np.uint64(place & 63)
    if place & 63 > 58:
        words[(place >> 6) + 1] |= value >> np.uint64(64 - (place & 63))
    return place + 6


@inlined
def _six(words: Any, place: Any) -> Any:
    """6 bits from bit `place` on. A word follows the one of that bit."""
    shift = np.uint64(place & 63)
    bits = words[place >> 6] >> shift | words[(place >> 6) + 1] << np.uint64(1) << (np.uint64(63) - shift)
    return np.int64(bits & np.uint64(63))


@kernel
def _read_shares(words: Any, place: Any, listed: Any, shares: Any) -> Any:
    """Read the weights of a class from bit `place` on, as shares. Returns the first bit after them, or -1."""
    shares[:] = 0
    symbol, end = np.int64(0), 64 * (words.size - 1)
    while symbol < listed and place + 6 <= end:
        weight = _six(words, place)
        place += 6
        if weight:
            shares[symbol] = LEVELS[weight]
        elif place + 6 > end:
            return -1
        else:
            symbol += _six(words, place)
            place += 6
        symbol += 1
    total = shares.sum()
    if symbol != listed or total == 0:
        return -1
    largest = shares.argmax()
    for each in range(SYMBOLS):
        if shares[each]:
            shares[each] = max((shares[each] << STATE_BITS) // total, 1)
    shares[largest] += _STATES - shares.sum()
    return place


@inlined
def _bytes_from(data: Any, place: Any, last: Any) -> Any:
    """At least 57 bits from bit `place` on; of no byte after the eighth from `last` on."""
    at = min(place >> np.uint64(3), last)
    bits = np.uint64(data[at])
    for i in range(1, 8):
        bits |= np.uint64(data[at + np.uint64(i)]) << np.uint64(8 * i)
    return bits >> (place & np.uint64(7))


@inlined
def _follow(table: Any, state: Any, bits: Any) -> Any:
    """The next state, the change, the bits that are left, and how many were used: at most 22."""
    entry = table[state]
    count = np.uint64(entry >> np.uint32(12)) & np.uint64(15)
    spared = np.uint64(entry >> np.uint32(16)) & np.uint64(15)
    state = np.uint64(entry & np.uint32(4095)) + (bits & ((np.uint64(1) << count) - np.uint64(1)))
    bits >>= count
    change = np.uint64(entry >> np.uint32(20)) << spared | bits & ((np.uint64(1) << spared) - np.uint64(1))
    return state, np.uint16(change), bits >> spared, count + spared


@kernel
def _find_tables(old: Any, mantissa: Any, base: Any, starts: Any) -> None:
    """Where the states of each number's class begin."""
    shift, mask, first = np.int32(mantissa), np.int32((1 << (15 - mantissa)) - 1), np.int32(base)
    for i in range(old.size):
        kind = min(max(first - ((np.int32(old[i]) >> shift) & mask), np.int32(0)), np.int32(CLASSES - 1))
        starts[i] = np.uint16(kind << np.int32(STATE_BITS))


@kernel
def _change_all(old: Any, changes: Any) -> None:
    """New bits, in place. In 32 bits, so that the loop is vectorised."""
    for i in range(old.size):
        bits, change = np.int32(old[i]), np.int32(changes[i])
        ascending = bits ^ ((bits >> np.int32(15)) & np.int32(0x7FFF))
        step = (change >> np.int32(1)) ^ -(change & np.int32(1))
        new = np.int32(np.int16(ascending + step))
        old[i] = np.int16(new ^ ((new >> np.int32(15)) & np.int32(0x7FFF)))


@prepared("uint64[::1], uint8[::1], int16[::1], int64, int64, uint8[::1]")
@kernel
def _add_states(words: Any, data: Any, old: Any, mantissa: Any, base: Any, table: Any) -> Any:
    """Read states, and change `old`; returns whether all bits were a code of so many numbers.

    `data` are the bytes of `words`, of which the last one is a zero. An entry has the next state's base in 12
    bits, the number of its lower bits in 4, the number of the change's low bits in 4, and its upper bits.
    """
    symbols, shares = np.zeros(_STATES, np.uint8), np.zeros(SYMBOLS, np.int64)
    states = np.empty(CLASSES << STATE_BITS, np.uint32)
    start: Any = np.int64(64)
    end = 64 * (words.size - 1)
    if end < 64 or words[0] >> np.uint64(_SKIPPED + 6):
        return False
    for kind in range(CLASSES):
        of_class = states[kind << STATE_BITS : (kind + 1) << STATE_BITS]
        if not table[kind]:
            for state in range(_STATES):
                of_class[state] = state
            continue
        start = _read_shares(words, start, np.int64(table[kind]), shares) if table[kind] <= SYMBOLS else -1
        if start < 0:
            return False
        _spread(shares, symbols)
        for state in range(_STATES):
            symbol = symbols[state]
            count = STATE_BITS + 1 - np.int64(_LENGTH[shares[symbol]])
            low = (shares[symbol] << count) - _STATES
            of_class[state] = low | count << 12 | _SPARED[symbol] << 16 | _UPPER[symbol] << 20
            shares[symbol] += 1
    skipped = np.int64((words[0] >> np.uint64(_SKIPPED)) & np.uint64(63))
    if start & 63:
        if words[start >> 6] >> np.uint64(start & 63):
            return False
        start += -start & 63
    if words[start >> 6] & ((np.uint64(1) << np.uint64(skipped)) - np.uint64(1)):
        return False
    place, last = np.uint64(start + skipped), np.uint64(data.size - 8)
    mask = np.uint64(_STATES - 1)
    a, b = words[0] & mask, words[0] >> np.uint64(STATE_BITS) & mask
    c, d = words[0] >> np.uint64(2 * STATE_BITS) & mask, words[0] >> np.uint64(3 * STATE_BITS) & mask
    starts, changes = np.empty(_BLOCK, np.uint16), np.empty(_BLOCK, np.uint16)
    for begin in range(0, old.size, _BLOCK):
        numbers = old[begin : begin + _BLOCK]
        many = np.uint64(numbers.size)
        _find_tables(numbers, mantissa, base, starts)
        i = np.uint64(0)
        while i + np.uint64(3) < many:
            bits = _bytes_from(data, place, last)
            a, changes[i], bits, one = _follow(states, a + np.uint64(starts[i]), bits)
            i += np.uint64(1)
            b, changes[i], bits, two = _follow(states, b + np.uint64(starts[i]), bits)
            i += np.uint64(1)
            place += one + two
            bits = _bytes_from(data, place, last)
            c, changes[i], bits, one = _follow(states, c + np.uint64(starts[i]), bits)
            i += np.uint64(1)
            d, changes[i], bits, two = _follow(states, d + np.uint64(starts[i]), bits)
            i += np.uint64(1)
            place += one + two
        while i < many:  # in the last block only, so that turns need not be put right again
            bits = _bytes_from(data, place, last)
            a, changes[i], bits, one = _follow(states, a + np.uint64(starts[i]), bits)
            place += one
            a, b, c, d = b, c, d, a
            i += np.uint64(1)
        _change_all(numbers, changes)
    return place == np.uint64(end) and a | b | c | d == np.uint64(0)
