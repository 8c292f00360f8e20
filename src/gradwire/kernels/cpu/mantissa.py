"""Splitting of floats into a symbol and a field of variable width, packing of fields into words, and the
inverse.

Numbers are float32's bits, or 16-bit floats spread over them: sign at bit 31, exponent from bit 23 on, and
the lowest `base` bits of the mantissa missing. Dropped bits count from the lowest existing bit. The loops
over whole blocks vectorise. `how` is (thresholds, flush, explicit, base).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.huffman import put_word
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared

_U, _I = np.uint64, np.uint32
_0, _1, _3, _6, _63 = (_U(number) for number in (0, 1, 3, 6, 63))
_MAGNITUDE, _MANTISSA, _IMPLICIT = _I(0x7FFFFFFF), _I(0x7FFFFF), _I(0x800000)
_TINY = _I(254)
_FLOAT16, _LAST_OF_FLOAT16 = _I(13), _I(30)  # its missing bits, its largest finite exponent


@kernel
def _dropped(exponent: Any, drop: Any, how: Any) -> Any:
    """Number of bits to drop of a value with this `exponent`: `drop`, or the bits below the threshold
    `drop`.
    """
    thresholds, _, _, base = how
    if thresholds:
        drop = _I(max(drop, exponent) - exponent)
    whole = _LAST_OF_FLOAT16 if base == _FLOAT16 else _TINY
    return _I(0) if exponent == _I(0) or exponent >= whole else drop


@kernel
def _rounded(bits: Any, drop: Any, how: Any) -> Any:
    """Round the magnitude in `bits` of a float32 to the nearest one whose lowest bits are zero, ties to even.
    `drop` and `how` say which bits, as in `_dropped`.

    With a threshold above the number's own step, the result is 0 or one step of the threshold.
    """
    thresholds, flush, _, base = how
    magnitude = _I(bits & _MAGNITUDE)
    exponent = _I(magnitude >> _I(23))
    d, most = _dropped(exponent, drop, how), _I(_I(23) - base)
    s = _I(base + min(d, most))
    ones = _I(_I(_I(1) << s) - _I(1))
    half = _I(_I(ones + _I(_I(magnitude >> s) & _I(1))) >> _I(1))
    near = _I(_I(magnitude + half) & ~ones)
    if thresholds:
        # One bit more than there are: above half a step it becomes a step, the next power of two.
        up = _I(_I(exponent + _I(1)) << _I(23))
        up = up if d == _I(most + _I(1)) and _I(magnitude & _MANTISSA) != _I(0) else _I(0)
        near = up if d > most else near
    return _I(0) if flush and exponent == _I(0) else near


@prepared(
    "uint32[::1], uint8[::1], Tuple((boolean, boolean, boolean, uint32)), uint32[::1]", subject="frames"
)
@kernel
def round_words(words: Any, drops: Any, how: Any, out: Any) -> None:
    """Write to `out` the `words` as a receiver decodes them; both uint32 (n,)."""
    exact = not how[1]
    for i in range(words.size):
        near = _rounded(words[i], _I(drops[i]), how)
        keeps = near != _I(0) or (exact and _I(words[i] & _MAGNITUDE) == _I(0))
        out[i] = _I(near | _I(words[i] & ~_MAGNITUDE)) if keeps else _I(0)


@prepared(
    "uint32[::1], uint8[::1], Tuple((boolean, boolean, boolean, uint32)), "
    "uint8[::1], uint8[::1], uint32[::1]",
    subject="frames",
)
@kernel
def split(words: Any, drops: Any, how: Any, symbols: Any, widths: Any, fields: Any) -> None:
    """Round `words` and split them into symbols and fields.

    Args:
        words, drops, how: uint32 (n,), uint8 (n,), and (thresholds, flush, explicit, base).
        symbols: uint8 (n,), written: exponents. 0 stands for the number zero, 254 for a tiny float, 255 for
            an exponent of 254 or more.
        widths: uint8 (n,), written: bits of each field, 0 for a symbol of 0.
        fields: uint32 (n,), written: sign and kept mantissa.
    """
    _, flush, _, base = how
    full, exact = _I(24 - base), not flush
    for i in range(words.size):
        near = _rounded(words[i], _I(drops[i]), how)
        exponent = _I(near >> _I(23))
        tiny = exact and _I(words[i] & _MAGNITUDE) < _IMPLICIT and words[i] != _I(0)
        symbol = _I(exponent + _I(exponent == _TINY))
        symbol = _TINY if tiny else symbol
        drop = _dropped(exponent, _I(drops[i]), how)
        mantissa = _I(_I(_I(words[i] >> _I(31)) << _I(23)) | _I(near & _MANTISSA))
        symbols[i] = np.uint8(symbol)
        widths[i] = np.uint8(_I(0) if symbol == _I(0) else _I(full - drop))
        fields[i] = _I(0) if symbol == _I(0) else _I(mantissa >> _I(base + drop))


@kernel
def exponents_at(
    words: Any, drops: Any, drop: Any, how: Any, symbols: Any, marks: Any, escaped: Any, out: Any
) -> Any:
    """Write the exponent of each number whose symbol is escaped, one byte each, in order; 0 for a tiny float.

    Args:
        words, drops, drop, how: as for `split`; `drop` applies to all numbers if `drops` is empty.
        symbols: uint8 (n,).
        marks: int32, numbers of the quads of symbols that may contain escaped ones.
        escaped: (256,), True for escaped symbols.
        out: uint8, written.

    Returns the number of bytes.
    """
    number = 0
    for mark in marks:
        for i in range(4 * mark, min(4 * mark + 4, words.size)):
            if escaped[symbols[i]]:
                here = _I(drops[i] if drops.size else drop)
                out[number] = np.uint8(_rounded(words[i], here, how) >> _I(23))
                number += 1
    return number


@kernel
def pack_fields(fields: Any, widths: Any, out: Any, place: Any, held: Any, filled: Any) -> Any:
    """Append fields to uint8 `out`, lowest bits first.

    Args:
        fields, widths: an even number of fields, of at most 24 bits each.
        place, held, filled: number of the next byte, bits that do not fill it yet, and their number.

    Returns the new (place, held, filled).
    """
    for i in range(0, fields.size - 1, 2):
        first = _U(widths[i])
        held |= (_U(fields[i]) | (_U(fields[i + 1]) << first)) << filled
        filled += first + _U(widths[i + 1])
        put_word(out, place, held)
        place += filled >> _3
        held >>= filled & _U(56)
        filled &= _U(7)
    return place, held, filled


@kernel
def widths_of(exponents: Any, symbols: Any, drops: Any, how: Any, widths: Any) -> Any:
    """Compute from decoded exponents how many bits the field of each number has.

    Args:
        exponents, symbols, drops: (n,), as decoded; a symbol of 0 is the number zero, which has no field.
        how: (thresholds, flush, explicit, base).
        widths: uint8 (n,), written: bits of each field.

    Returns the sum of `widths`, or -1 if some number would keep no bit, as in a damaged frame.
    """
    full, bits, most = _I(24 - how[3]), _I(0), _I(0)
    for i in range(symbols.size):
        drop = _dropped(_I(exponents[i]), _I(drops[i]), how)
        most = max(most, drop)
        width = _I(0) if symbols[i] == np.uint8(0) else _I(full - min(drop, full))
        widths[i] = np.uint8(width)
        bits = _I(bits + width)
    return np.int64(-1) if most >= full else np.int64(bits)


@kernel
def _word_at(data: Any, place: Any) -> Any:
    """Load eight bytes of uint8 `data` from any place on, as one 64-bit word. The compiler makes one
    load of it.
    """
    low = _U(data[place]) | _U(data[place + _U(1)]) << _U(8) | _U(data[place + _U(2)]) << _U(16)
    low |= _U(data[place + _U(3)]) << _U(24) | _U(data[place + _U(4)]) << _U(32)
    high = _U(data[place + _U(5)]) << _U(40) | _U(data[place + _U(6)]) << _U(48)
    return low | high | _U(data[place + _U(7)]) << _U(56)


@kernel
def unpack_fields(data: Any, bit: Any, widths: Any, fields: Any) -> Any:
    """Read fields of different widths that lie one after the other in `data`.

    Args:
        data: uint8; 8 bytes more than the fields take must be readable.
        bit: place of the first field, in bits.
        widths: uint8 (n,), bits of each field, at most 24; n is even.
        fields: uint32 (n,), written.

    Returns the place after the last field, in bits.
    """
    bit = _U(bit)
    for i in range(0, fields.size - 1, 2):
        window, first, second = _word_at(data, bit >> _3) >> (bit & _U(7)), _U(widths[i]), _U(widths[i + 1])
        fields[i] = _I(window & ((_1 << first) - _1))
        fields[i + 1] = _I((window >> first) & ((_1 << second) - _1))
        bit += first + second
    return bit


@kernel
def join(exponents: Any, widths: Any, fields: Any, out: Any) -> None:
    """Assemble float32 numbers from their exponents and fields; the inverse of `split`.

    Args:
        exponents: (n,), biased, 0 … 255.
        widths, fields: (n,), as `split` writes them: sign and kept mantissa.
        out: uint32 (n,), written: bits of the numbers.
    """
    for i in range(fields.size):
        mantissa = _I(fields[i] << _I(_I(24) - _I(widths[i])))
        sign, exponent = _I(_I(mantissa & _IMPLICIT) << _I(8)), _I(_I(exponents[i]) << _I(23))
        out[i] = _I(_I(sign | exponent) | _I(mantissa & _MANTISSA))


@kernel
def write_levels(symbols: Any, drops: Any, out: Any, place: Any) -> Any:
    """Write for every number that is not zero its level: dropped bits divided by 6, in two bits.

    Args:
        symbols: uint8 (n,); 0 is the number zero, which has no level. Symbols 254 and 255 have level 0.
        drops: uint8 (n,), dropped bits of each number: 0, 6, 12 or 18.
        out: uint64, written from word `place` on, the lowest bits first.
        place: number of the first word.

    Returns the number of the word after the last.
    """
    held, filled, place = _0, _0, _U(place)
    for i in range(symbols.size):
        level = _U(0) if _I(symbols[i]) >= _TINY else _U(drops[i] // 6)
        if symbols[i] != 0:
            held |= level << filled
            filled += _U(2)
            if filled == _U(64):
                out[place] = held
                held, filled = _0, _0
                place += _1
    if filled > _0:
        out[place] = held
        place += _1
    return place


@kernel
def read_levels(words: Any, bit: Any, limit: Any, symbols: Any, drops: Any) -> Any:
    """Read the levels that `write_levels` wrote, as dropped bits.

    Args:
        words: uint64.
        bit: place of the first level, in bits.
        limit: last place that may be read, in bits; a damaged frame may ask for more levels than there are.
        symbols: uint8 (n,); a symbol of 0 has no level, and its `drops` are 0.
        drops: uint8 (n,), written: 0, 6, 12 or 18.

    Returns the place after the last level, in bits.
    """
    bit = _U(bit)
    for i in range(symbols.size):
        level = (words[min(bit, limit) >> _6] >> (bit & _63)) & _3
        there = _U(symbols[i] != 0)
        drops[i] = np.uint8(_6 * level * there)
        bit += there << _1
    return bit
