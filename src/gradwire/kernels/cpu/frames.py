"""Chunks of a GComp frame: numbers are split into symbols and fields, coded and packed, and back.

`docs/engineering/wire-format.md` describes the layout. A chunk is processed in blocks that stay in the
first-level cache between two loops. Only its symbols, a byte each, are kept for the whole chunk, because four
streams are coded side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.checksums import checksum  # noqa: F401  # which frames end with
from gradwire.kernels.cpu.huffman import count_symbols, decode_streams, encode_stream, put_word, quarter
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.mantissa import (
    exponents_at,
    join,
    pack_fields,
    read_levels,
    round_words,
    split,
    unpack_fields,
    widths_of,
    write_levels,
)
from gradwire.kernels.cpu.prepared import prepared

_U, _I = np.uint64, np.uint32
BLOCK = 2048
_HOW = "Tuple((boolean, boolean, boolean, uint32))"
_STREAMS, _ESCAPES, _LEVELS, _FIELDS, _KIND = 0, 4, 5, 6, 7


@kernel
def _drops_of(drops: Any, same: Any, here: Any, count: Any) -> Any:
    """Dropped bits of `count` elements from number `here` on: of `drops`, or of `same` if `drops` is
    empty.
    """
    return same[:count] if drops.size == 0 else drops[here : here + count]


@kernel
def _split_chunk(words: Any, drops: Any, same: Any, how: Any, symbols: Any, out: Any) -> Any:
    """Split the floats of a chunk into symbols and fields.

    Args:
        words: uint32 (n,), bits of the floats.
        drops, same, how: as in `encode_chunks`.
        symbols: uint8 (n,), written.
        out: uint8, written: the fields, packed.

    Returns the number of 8-byte words that the fields take.
    """
    widths, fields = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint32)
    place, held, filled = _U(0), _U(0), _U(0)
    for start in range(0, words.size, BLOCK):
        m = min(BLOCK, words.size - start)
        here = words[start : start + m], _drops_of(drops, same, start, m)
        split(here[0], here[1], how, symbols[start : start + m], widths[:m], fields[:m])
        if m % 2:
            widths[m], fields[m] = 0, 0
        even = m + m % 2
        place, held, filled = pack_fields(fields[:even], widths[:even], out, place, held, filled)
    put_word(out, place, held)
    return (place + (filled + _U(7) >> _U(3)) + _U(7)) >> _U(3)


@kernel
def _code_chunk(
    words: Any, drops: Any, same: Any, how: Any, lookups: Any, symbols: Any, out: Any, sizes: Any
) -> Any:
    """Encode the symbols of a chunk: streams, escapes and levels.

    Args:
        words, drops, same, how: as in `encode_chunks`, for one chunk.
        lookups: (pairs, singles, escaped): tables as in `encode_stream`, and which symbols are escaped.
        symbols: uint8, those of the chunk.
        out: uint64, written.
        sizes: uint16 (8,), written: words of each segment.

    Returns the number of words written.
    """
    pairs, singles, escaped = lookups
    count, q = words.size, quarter(words.size)
    data, place = out.view(np.uint8), _U(0)
    marks, marked = np.empty(count // 4 + 1, np.int32), _U(0)
    for k in range(4):
        start, first, last = place, min(k * q, count), min(k * q + q, count)
        place, marked = encode_stream(symbols, first, last, pairs, singles, data, place, marks, marked)
        sizes[_STREAMS + k] = np.uint16((place - start) >> _U(3))
    rest = data[np.int64(place) :]
    number = exponents_at(words, drops, same[0], how, symbols, marks[: np.int64(marked)], escaped, rest)
    padded = (number + 7) // 8
    for i in range(number, 8 * padded):
        rest[i] = 0
    sizes[_ESCAPES] = np.uint16(padded)
    place = stop = (place >> _U(3)) + _U(padded)
    if how[2]:
        stop = write_levels(symbols[:count], drops, out, place)
    sizes[_LEVELS] = np.uint16(stop - place)
    return stop


@kernel
def _append_raw(words: Any, drops: Any, same: Any, how: Any, out: Any, place: Any) -> Any:
    """Append a chunk raw: its rounded floats, in 4 bytes or 2 (`base` above 0), and zeros up to a whole word.

    Args:
        words, drops, same, how: as in `encode_chunks`, for one chunk.
        out: uint64, written from word `place` on.

    Returns the number of the word after the chunk.
    """
    base = how[3]
    near = np.empty(BLOCK, np.uint32)
    narrow = out[np.int64(place) :].view(np.uint16)
    for start in range(0, words.size, BLOCK):
        m = min(BLOCK, words.size - start)
        round_words(words[start : start + m], _drops_of(drops, same, start, m), how, near[:m])
        for i in range(m, min(m + 3, BLOCK)):
            near[i] = 0
        if base == _I(0):
            for i in range((m + 1) // 2):
                out[place + _U(i)] = _U(near[2 * i]) | _U(near[2 * i + 1]) << _U(32)
            place += _U((m + 1) // 2)
        else:
            for i in range((m + 3) // 4 * 4):
                narrow[start + i] = narrowed(near[i], base)
            place += _U((m + 3) // 4)
    return place


@kernel
def narrowed(word: Any, base: Any) -> Any:
    """Convert a 16-bit float that was spread over float32's bits back to 16 bits.

    The `base` missing bits of the mantissa are left out, and float16's exponent is cut to 5 bits.
    """
    rest = (word & _I(0x7FFFFFFF)) >> base
    return np.uint16(word >> _I(16) & _I(0x8000) | rest & _I(0x7FFF))


@prepared(
    f"uint32[::1], uint8[::1], uint8[::1], {_HOW}, Tuple((uint32[::1], uint32[::1], boolean[::1])), int64, "
    "uint64[::1], uint16[:, ::1], int64[:, ::1]",
)
@kernel
def encode_chunks(
    words: Any,
    drops: Any,
    same: Any,
    how: Any,
    lookups: Any,
    chunk: Any,
    out: Any,
    directory: Any,
    counts: Any,
) -> Any:
    """Encode numbers in chunks.

    Args:
        words: uint32 (n,), bits of the numbers.
        drops: uint8 (n,), dropped bits of each number; or empty, if `same` applies.
        same: uint8 (2048,), one value repeated.
        how: (thresholds, flush, explicit, base).
        lookups: (pairs, singles, escaped), tables of the Huffman code.
        chunk: numbers per chunk.
        out: uint64, written. A chunk that coding would enlarge is stored raw.
        directory: uint16 (chunks, 8), written: words of each segment.
        counts: int64 (4, 256), to which symbols are counted; or (0, 256) to count none.

    Returns the number of words written.
    """
    most = min(chunk, words.size)
    symbols = np.empty((most + 3) // 4 * 4, np.uint8)
    coded, packed = np.empty(most + 16, np.uint64), np.empty(most * 24 // 64 + 3, np.uint64)
    place = _U(0)
    each = 4 if how[3] == _I(0) else 2
    for index in range(directory.shape[0]):
        start = index * chunk
        stop, sizes = min(start + chunk, words.size), directory[index]
        here, drops_here = words[start:stop], drops[start:stop]
        fields = _split_chunk(here, drops_here, same, how, symbols, packed.view(np.uint8))
        if counts.size:
            count_symbols(symbols[: stop - start], counts)
        streams = _code_chunk(here, drops_here, same, how, lookups, symbols, coded, sizes)
        raw = _U((each * (stop - start) + 7) // 8)
        sizes[_KIND] = streams + fields >= raw
        if sizes[_KIND]:
            for k in range(_FIELDS):
                sizes[k] = 0
            sizes[_FIELDS] = np.uint16(raw)
            place = _append_raw(here, drops_here, same, how, out, place)
        else:
            sizes[_FIELDS] = np.uint16(fields)
            place = _copied(packed, fields, out, _copied(coded, streams, out, place))
    return place


@kernel
def _copied(words: Any, count: Any, out: Any, place: Any) -> Any:
    for i in range(count):
        out[place + i] = words[i]
    return place + count


@kernel
def _exponents(symbols: Any, exponents: Any, flush: Any) -> Any:
    """Write the uint8 `exponents` of symbols (n,).

    Returns the number of escaped symbols (255), or -1 if `flush` and there are tiny floats (254), which such
    a frame cannot contain.
    """
    escaped, tiny = _I(0), _I(0)
    for i in range(symbols.size):
        escaped += _I(symbols[i] == 255)
        tiny += _I(symbols[i] == 254)
        exponents[i] = np.uint8(0) if symbols[i] == 254 else symbols[i]
    return np.int64(-1) if flush and tiny > _I(0) else np.int64(escaped)


@kernel
def _largest(values: Any) -> Any:
    most = np.uint8(0)
    for i in range(values.size):
        most = max(most, values[i])
    return most


@kernel
def _read_escapes(escapes: Any, number: Any, symbols: Any, exponents: Any) -> Any:
    """Replace escaped symbols by the ones that `escapes` spells out, and write their exponents.

    Args:
        escapes: uint8, one raw exponent per escaped symbol, then zeros up to a whole word.
        number: number of escaped symbols.
        symbols, exponents: uint8 (n,), updated where a symbol is 255.

    Returns the number of tiny floats (raw exponent 0), or -1 if the padding is not zero.
    """
    place, tiny = 0, 0
    for start in range(0, symbols.size, 256):
        stop = min(start + 256, symbols.size)
        if _largest(symbols[start:stop]) == 255:
            for i in range(start, stop):
                if symbols[i] == 255:
                    raw = escapes[place]
                    place += 1
                    exponents[i] = raw
                    tiny += raw == 0
                    if raw < 254:
                        symbols[i] = raw if raw else 254
    for i in range(number, escapes.size):
        if escapes[i] != 0:
            return -1
    return tiny


@kernel
def _decode_symbols(
    words: Any, place: Any, sizes: Any, how: Any, windows: Any, lengths: Any, symbols: Any, exponents: Any
) -> Any:
    """Decode the symbols of a chunk, and from them the exponents.

    Args:
        words, place, sizes, how: as in `_decode_chunk`.
        windows, lengths: as in `decode_streams`.
        symbols, exponents: uint8 (n,), written.

    Returns False if the streams or escapes are damaged.
    """
    ends = np.empty(5, np.uint64)
    ends[0] = place
    for k in range(4):
        ends[k + 1] = ends[k] + _U(sizes[_STREAMS + k])
    if not decode_streams(words, ends, windows, lengths, symbols, symbols.size):
        return False
    number = _exponents(symbols, exponents, how[1])
    if number < 0 or np.int64(sizes[_ESCAPES]) != (number + 7) // 8:
        return False
    if number:
        start = np.int64(ends[4])
        escapes = words[start : start + np.int64(sizes[_ESCAPES])].view(np.uint8)
        tiny = _read_escapes(escapes, number, symbols, exponents)
        if tiny < 0 or (tiny and how[1]):
            return False
    if how[3] == _I(13):  # float16's exponents
        return _largest(exponents) < 32
    return True


@kernel
def _read_raw(words: Any, place: Any, base: Any, out: Any) -> None:
    if base == _I(0):
        for i in range(out.size):
            out[i] = _I(words[place + i // 2] >> _U(32 * (i % 2)))
    else:
        narrow = words[place:].view(np.uint16)
        for i in range(out.size):
            rest = _I(narrow[i] & np.uint16(0x7FFF)) << base
            out[i] = _I(narrow[i] >> np.uint16(15)) << _I(31) | rest


@kernel
def _deliver(near: Any, out: Any, floats: Any, add: Any) -> None:
    if add:
        values = near.view(np.float32)
        for i in range(near.size):
            floats[i] += values[i]
    else:
        for i in range(near.size):
            out[i] = near[i]


@kernel
def _decode_chunk(
    words: Any, place: Any, sizes: Any, drops: Any, same: Any, how: Any, lookups: Any, work: Any,
    out: Any, floats: Any, add: Any
) -> Any:  # fmt: skip
    """Decode one coded chunk of floats.

    Args:
        words: uint64, the frame.
        place: number of the chunk's first word.
        sizes: uint16 (8,), the chunk's row of the directory: words of four streams, escapes, levels, fields.
        drops, same: dropped bits, as in `encode_chunks`; not used if `how` says explicit levels.
        how: (thresholds, flush, explicit, base).
        lookups: (windows, lengths), as in `decode_streams`.
        work: scratch memory, as `decode_chunks` makes it.
        out: uint32 (n,), written: bits of the floats.
        floats: the same memory as float32; with `add` the floats are added to it instead.

    Returns False if the chunk is damaged.
    """
    explicit = how[2]
    symbols, exponents, widths, fields, near, levels = work
    symbols, exponents = symbols[: out.size], exponents[: out.size]
    if not _decode_symbols(words, place, sizes, how, lookups[0], lookups[1], symbols, exponents):
        return False
    for k in range(_LEVELS):
        place += _U(sizes[k])
    data = words.view(np.uint8)
    level, level_stop = place << _U(6), (place + _U(sizes[_LEVELS])) << _U(6)
    bit = level_stop
    limit = bit + (_U(sizes[_FIELDS]) << _U(6))
    for start in range(0, out.size, BLOCK):
        m = min(BLOCK, out.size - start)
        stop = start + m
        if explicit:
            level = read_levels(words, level, level_stop, symbols[start:stop], levels)
            drops_here = levels[:m]
        else:
            drops_here = _drops_of(drops, same, start, m)
        bits = widths_of(exponents[start:stop], symbols[start:stop], drops_here, how, widths)
        if bits < 0 or bit + _U(bits) > limit:
            return False
        if m % 2:
            widths[m] = 0
        even = m + m % 2
        bit = unpack_fields(data, bit, widths[:even], fields[:even])
        join(exponents[start:stop], widths[:m], fields[:m], near[:m])
        _deliver(near[:m], out[start:stop], floats[start:stop], add)
    return _ends(words, level, level_stop) and _ends(words, bit, limit)


@kernel
def _ends(words: Any, bit: Any, limit: Any) -> Any:
    """True if bit number `bit` lies in the last word before word `limit`, and only zeros follow it in
    that word.
    """
    if (bit + _U(63)) >> _U(6) != limit >> _U(6):
        return False
    return bit & _U(63) == _U(0) or words[bit >> _U(6)] >> (bit & _U(63)) == _U(0)


@prepared(
    f"uint64[::1], uint64, uint16[:, ::1], int64, uint8[::1], uint8[::1], {_HOW}, "
    "Tuple((uint64[::1], uint8[::1])), uint32[::1], float32[::1], boolean",
)
@kernel
def decode_chunks(
    words: Any, place: Any, directory: Any, chunk: Any, drops: Any, same: Any, how: Any, lookups: Any,
    out: Any, floats: Any, add: Any
) -> Any:  # fmt: skip
    """Decode all chunks of a frame.

    Args:
        words: uint64, the frame; three words after the last segment must be readable.
        place: number of the first chunk's first word.
        directory: uint16 (chunks, 8), as `encode_chunks` writes it; its segments lie within `words`.
        chunk: floats per chunk.
        drops, same, how: as in `encode_chunks`.
        lookups: (windows, lengths), as in `decode_streams`.
        out: uint32 (n,), written: bits of the floats.
        floats: the same memory as float32; with `add` the floats are added to it instead.

    Returns the number of the first damaged chunk, or -1 if all are sound.
    """
    most = min(chunk, out.size)
    work = (
        np.empty(most, np.uint8), np.empty(most, np.uint8), np.empty(BLOCK, np.uint8),
        np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint8),
    )  # fmt: skip
    place = _U(place)
    for index in range(directory.shape[0]):
        start, sizes = index * chunk, directory[index]
        stop = min(start + chunk, out.size)
        here = out[start:stop], floats[start:stop], drops[start:stop]
        if sizes[_KIND]:
            for block in range(0, stop - start, BLOCK):
                m = min(BLOCK, stop - start - block)
                per_word = 2 if how[3] == _I(0) else 4
                _read_raw(words, np.int64(place) + block // per_word, how[3], work[4][:m])
                end = block + m
                _deliver(work[4][:m], here[0][block:end], here[1][block:end], add)
            first, bits = place << _U(6), _U(32 if how[3] == _I(0) else 16)
            if not _ends(words, first + _U(stop - start) * bits, first + (_U(sizes[_FIELDS]) << _U(6))):
                return index
        elif not _decode_chunk(words, place, sizes, here[2], same, how, lookups, work, here[0], here[1], add):
            return index
        for k in range(_KIND):
            place += _U(sizes[k])
    return -1
