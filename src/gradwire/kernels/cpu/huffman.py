"""Huffman codes of bytes: tables of a code, encoding, and decoding of four interleaved streams.

A code's first bit is its lowest, and is written to the lowest free bit of a 64-bit word. Numbers are
unsigned, so that no index is tested for being negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared

_U = np.uint64
_0, _1, _3, _6, _7, _8, _31, _56, _59, _63 = (_U(number) for number in (0, 1, 3, 6, 7, 8, 31, 56, 59, 63))
_SEVERAL = _U(43)  # symbols that five look-ups may write: seven each, and a whole word at the last


@prepared(
    "uint8[::1], int64[:, ::1]",
)
@kernel
def count_symbols(symbols: Any, counts: Any) -> None:
    """Count `symbols` into int64 `counts` (4, 256). Four rows are used in turn, because runs of a symbol
    would stall on one.
    """
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, symbols[i]] += 1
        counts[1, symbols[i + 1]] += 1
        counts[2, symbols[i + 2]] += 1
        counts[3, symbols[i + 3]] += 1
    for i in range(whole, symbols.size):
        counts[0, symbols[i]] += 1


@prepared(
    "uint32[::1], uint32[::1]",
)
@kernel
def fill_pairs(singles: Any, pairs: Any) -> None:
    """Fill uint32 `pairs` (65536,) with entries of two symbols, from `singles` (256,). The lower byte comes
    first.

    An entry has the length of the code (5 bits), whether a symbol is escaped (1 bit), and the code.
    """
    six, length, flag = np.uint32(6), np.uint32(31), np.uint32(32)
    for second in range(256):
        b = singles[second]
        for first in range(256):
            a = singles[first]
            code = (a >> six) | ((b >> six) << (a & length))
            pairs[second * 256 + first] = (code << six) | ((a | b) & flag) | ((a & length) + (b & length))


@prepared(
    "uint32[::1], uint8[::1], int64, uint64[::1]",
)
@kernel
def fill_windows(singles: Any, lengths: Any, bits: Any, windows: Any) -> None:
    """Fill uint64 `windows` (2^bits,): the whole codes, up to seven, with which each window of `bits` bits
    begins.

    An entry has their symbols (7 bytes, the first one lowest), their number (3 bits) and their total length
    (5 bits).
    """
    width = _U(bits)
    mask = (_1 << width) - _1
    first = np.zeros(windows.size, np.uint8)
    for symbol in range(256):
        if lengths[symbol] > 0:
            code = _U(singles[symbol]) >> _6
            for place in range(code, _U(windows.size), _1 << _U(lengths[symbol])):
                first[place] = symbol
    for window in range(windows.size):
        entry, number, used = _0, _0, _0
        while number < _7:
            found = _U(first[(_U(window) >> used) & mask])
            if used + _U(lengths[found]) > width:
                break
            entry |= found << (_8 * number)
            used += _U(lengths[found])
            number += _1
        windows[window] = entry | (number << _56) | (used << _59)


@kernel
def put_word(out: Any, place: Any, word: Any) -> None:
    """Store a 64-bit word at any byte of uint8 `out`. The compiler makes one store of it."""
    out[place] = np.uint8(word)
    out[place + _U(1)] = np.uint8(word >> _U(8))
    out[place + _U(2)] = np.uint8(word >> _U(16))
    out[place + _U(3)] = np.uint8(word >> _U(24))
    out[place + _U(4)] = np.uint8(word >> _U(32))
    out[place + _U(5)] = np.uint8(word >> _U(40))
    out[place + _U(6)] = np.uint8(word >> _U(48))
    out[place + _U(7)] = np.uint8(word >> _U(56))


@kernel
def encode_stream(
    symbols: Any,
    start: Any,
    stop: Any,
    pairs: Any,
    singles: Any,
    out: Any,
    place: Any,
    marks: Any,
    marked: Any,
) -> Any:
    """Encode `symbols[start:stop]` as one stream of Huffman codes.

    Every four symbols write eight bytes, and the next four begin after their last bit. So there is no branch
    on the length. Escaped symbols are rare, so the branch that marks them is predicted well.

    Args:
        symbols: uint8; its size is a multiple of 4.
        start, stop: numbers of the first symbol, a multiple of 4, and of the one after the last.
        pairs, singles: tables from two symbols, or one, to an entry: the length of the code in the lowest 5
            bits, then a flag for an escaped symbol, then the code.
        out: uint8, written from byte `place` on, a multiple of 8.
        marks: int32, written from entry `marked` on: numbers of the quads that have an escaped symbol or are
            cut by `stop`.

    Returns (first byte of the word after the stream, number of marks).
    """
    quads, flag = symbols.view(np.uint32), np.uint32(32)
    held, filled, place, marked = _0, _0, _U(place), _U(marked)
    whole = start + (stop - start) // 4 * 4
    for i in range(_U(start // 4), _U(whole // 4)):
        a, b = pairs[quads[i] & np.uint32(0xFFFF)], pairs[quads[i] >> np.uint32(16)]
        if (a | b) & flag:
            marks[marked] = np.int32(i)
            marked += _1
        length = _U(a) & _31
        held |= ((_U(a) >> _6) | ((_U(b) >> _6) << length)) << filled
        filled += length + (_U(b) & _31)
        put_word(out, place, held)
        place += filled >> _3
        held >>= filled & _56
        filled &= _7
    for i in range(whole, stop):
        a = singles[symbols[i]]
        held |= (_U(a) >> _6) << filled
        filled += _U(a) & _31
        put_word(out, place, held)
        place += filled >> _3
        held >>= filled & _56
        filled &= _7
    if whole < stop:
        marks[marked] = np.int32(whole // 4)
        marked += _1
    if stop > start:
        put_word(out, place, held)
    return (place + (filled + _7 >> _3) + _7) & ~_7, marked


@kernel
def window_at(words: Any, bit: Any) -> Any:
    """Read 64 bits of uint64 `words` from bit `bit` on; two words are read."""
    word, shift = bit >> _6, bit & _63
    # Two shifts to the left, because one by 64 is undefined.
    return (words[word] >> shift) | ((words[word + _1] << _1) << (_63 - shift))


@kernel
def _finish_stream(
    words: Any, bit: Any, limit: Any, windows: Any, lengths: Any, symbols: Any, place: Any, stop: Any
) -> Any:
    """Decode the rest of one stream, from bit `bit` of uint64 `words`, into symbols `place` … `stop` - 1.

    `windows` and `lengths` are as in `decode_streams`. Returns True if its last code ends in the last word
    before bit `limit`, and only zeros follow it.
    """
    mask = _U(windows.size - 1)
    while place < stop:
        if bit > limit:
            return False
        entry = windows[window_at(words, bit) & mask]
        if place + _8 <= stop:
            put_word(symbols, place, entry)
            place += (entry >> _56) & _7
            bit += entry >> _59
        else:
            symbols[place] = np.uint8(entry)
            bit += _U(lengths[entry & _U(255)])
            place += _1
    if bit > limit or (bit + _63) >> _6 != limit >> _6:
        return False
    return bit & _63 == _0 or words[bit >> _6] >> (bit & _63) == _0


@kernel
def decode_streams(words: Any, ends: Any, windows: Any, lengths: Any, symbols: Any, count: Any) -> Any:
    """Decode four Huffman streams, of a quarter of `count` symbols each.

    Five look-ups of at most 12 bits are made in one window of 64 bits.

    Args:
        words: uint64; two words after the last stream must be readable.
        ends: uint64 (5,): stream k is the words ends[k] … ends[k + 1] - 1.
        windows: table from the next bits of a stream to the symbols in them: symbols in the lowest 56 bits,
            then their number in 3 bits and the bits that they take in 5.
        lengths: (256,), bits of each symbol's code.
        symbols: uint8, written.
        count: number of symbols in all four streams.

    Returns False if a stream is damaged: its codes do not end in its last word, or zeros do not follow them.
    """
    q = quarter(count)
    mask = _U(windows.size - 1)
    p0, p1, p2, p3 = _0, _U(min(q, count)), _U(min(2 * q, count)), _U(min(3 * q, count))
    b0, b1, b2, b3 = ends[0] << _6, ends[1] << _6, ends[2] << _6, ends[3] << _6
    l0, l1, l2, l3 = ends[1] << _6, ends[2] << _6, ends[3] << _6, ends[4] << _6
    s0, s1, s2, s3 = p1, p2, p3, _U(count)
    while (
        p0 + _SEVERAL <= s0 and p1 + _SEVERAL <= s1 and p2 + _SEVERAL <= s2 and p3 + _SEVERAL <= s3
        and b0 < l0 and b1 < l1 and b2 < l2 and b3 < l3
    ):  # fmt: skip
        w0, w1, w2, w3 = (
            window_at(words, b0), window_at(words, b1), window_at(words, b2), window_at(words, b3)
        )  # fmt: skip
        for _ in range(5):
            e0, e1, e2, e3 = windows[w0 & mask], windows[w1 & mask], windows[w2 & mask], windows[w3 & mask]
            put_word(symbols, p0, e0)
            put_word(symbols, p1, e1)
            put_word(symbols, p2, e2)
            put_word(symbols, p3, e3)
            p0, p1 = p0 + ((e0 >> _56) & _7), p1 + ((e1 >> _56) & _7)
            p2, p3 = p2 + ((e2 >> _56) & _7), p3 + ((e3 >> _56) & _7)
            u0, u1, u2, u3 = e0 >> _59, e1 >> _59, e2 >> _59, e3 >> _59
            w0, w1, w2, w3 = w0 >> u0, w1 >> u1, w2 >> u2, w3 >> u3
            b0, b1, b2, b3 = b0 + u0, b1 + u1, b2 + u2, b3 + u3
    good = _finish_stream(words, b0, l0, windows, lengths, symbols, p0, s0)
    good &= _finish_stream(words, b1, l1, windows, lengths, symbols, p1, s1)
    good &= _finish_stream(words, b2, l2, windows, lengths, symbols, p2, s2)
    return good and _finish_stream(words, b3, l3, windows, lengths, symbols, p3, s3)


@kernel
def quarter(count: Any) -> Any:
    """Number of symbols in each of the first three of four streams: a multiple of 4, so that quads
    start there.
    """
    return (count + 15) // 16 * 4
