"""Frames in plain Python, a bit at a time: the oracle of the fast codec.

It was written after `docs/engineering/wire-format.md` alone. It shares the header's layout and nothing else
with the fast one, and takes a minute for a million elements.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from gradwire.codec.gcomp.frame import CHUNK, HEADER_BYTES, Header, Key
from gradwire.errors import WireError

_WORD = 1 << 64
_P = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
_TYPES = {"torch.float32": (8, 23), "torch.bfloat16": (8, 7), "torch.float16": (5, 10)}
"""Bits of exponent and mantissa."""


def checksum(data: bytes) -> int:
    """XXH64, seed 0, of bytes whose number 8 divides.

    >>> hex(checksum(b"12345678"))
    '0xd2d02f08cf7cfd4a'
    """
    words, state = struct.unpack(f"<{len(data) // 8}Q", data), _P[4]
    whole = len(words) // 4 * 4
    if whole:
        flat_buffers = [(_P[0] + _P[1]) % _WORD, _P[1], 0, -_P[0] % _WORD]
        for i in range(whole):
            flat_buffers[i % 4] = _mixed(flat_buffers[i % 4], words[i])
        state = (
            sum(
                _turned(flat_buffer, bits)
                for flat_buffer, bits in zip(flat_buffers, (1, 7, 12, 18), strict=True)
            )
            % _WORD
        )
        for flat_buffer in flat_buffers:
            state = ((state ^ _mixed(0, flat_buffer)) * _P[0] + _P[3]) % _WORD
    state = (state + len(data)) % _WORD
    for word in words[whole:]:
        state = (_turned(state ^ _mixed(0, word), 27) * _P[0] + _P[3]) % _WORD
    for shift, factor in ((33, _P[1]), (29, _P[2])):
        state = (state ^ state >> shift) * factor % _WORD
    return state ^ state >> 32


def _turned(word: int, bits: int) -> int:
    return (word << bits | word >> 64 - bits) % _WORD


def _mixed(flat_buffer: int, word: int) -> int:
    return _turned((flat_buffer + word * _P[1]) % _WORD, 31) * _P[0] % _WORD


def unframe(
    data: bytes,
    numel: int,
    dtype: str,
    dropped: Sequence[int] | int | None,
    tables: Mapping[int, Sequence[int]],
    key: Key,
) -> list[int]:
    """The bits of `numel` numbers of `dtype` ("torch.float32" …), `tables` being lengths by id.

    `dropped` is as in the fast one, thresholds as a sequence. `WireError` where it raises one.
    """
    if len(data) < HEADER_BYTES + 8:
        raise WireError("too short")
    head = Header.unpack(data)
    _require(head.length == len(data) and len(data) % 8 == 0, "length")
    _require(int.from_bytes(data[-8:], "little") == checksum(data[:-8]), "checksum")
    _require((head.key, head.numel, str(head.dtype)) == (key, numel, dtype), "meant for another place")
    _require(head.table in tables, "table")
    _require(head.explicit == (dropped is None), "levels")
    _require(head.thresholds == isinstance(dropped, Sequence), "thresholds")
    _require(not isinstance(dropped, int) or dropped == head.drop, "dropped bits")
    _require(
        head.drop <= _TYPES[dtype][1] and (head.explicit + head.thresholds + (head.drop > 0) <= 1),
        "how to cut",
    )
    _require(dtype != "torch.float16" or not head.flush, "numbers below float16's normal range")
    rows = -(-numel // CHUNK)
    start = len(data) - 8 - 16 * rows
    _require(start >= HEADER_BYTES, "directory")
    place, numbers = HEADER_BYTES, list[int]()
    for row in struct.iter_unpack("<8H", data[start:-8]):
        count = min(CHUNK, numel - len(numbers))
        here = dropped if not isinstance(dropped, Sequence) else dropped[len(numbers) : len(numbers) + count]
        stop = place + 8 * sum(row[:7])
        _require(stop <= start and row[7] <= 1, "segments")
        numbers += _chunk(data[place:stop], row, count, here, head, tables[head.table])
        place = stop
    _require(place == start, "segments")
    return numbers


def _require(what: bool, name: str) -> None:
    if not what:
        raise WireError(f"a frame's {name}: wrong")


def _chunk(
    data: bytes,
    row: tuple[int, ...],
    count: int,
    dropped: Sequence[int] | int | None,
    head: Header,
    lengths: Sequence[int],
) -> list[int]:
    size = head.dtype.itemsize
    if row[7] == 1:
        _require(row[:6] == (0,) * 6 and row[6] == -(-count * size // 8), "raw chunk")
        _require(not any(data[count * size :]), "filling")
        return [int.from_bytes(data[size * i : size * i + size], "little") for i in range(count)]
    segments = [data[8 * a : 8 * b] for a, b in pairwise(accumulate(row[:7], initial=0))]
    q = -(-count // 16) * 4
    symbols = list[int]()
    for k in range(4):
        symbols += _stream(segments[k], max(0, min(q, count - k * q)), lengths)
    exponents = _exponents(symbols, segments[4], head)
    levels, fields = _Bits(segments[5]), _Bits(segments[6])
    each = dropped if isinstance(dropped, Sequence) else [dropped or 0] * count
    numbers = []
    for symbol, exponent, drop in zip(symbols, exponents, each, strict=True):
        if head.explicit:
            drop = 6 * levels.take(2) if symbol else 0
        numbers.append(_number(symbol, exponent, drop, head, fields))
    levels.finish()
    fields.finish()
    return numbers


def _number(symbol: int, exponent: int, drop: int, head: Header, fields: _Bits) -> int:
    exponent_bits, mantissa_bits = _TYPES[str(head.dtype)]
    if symbol == 0:
        return 0
    if head.thresholds:
        drop = max(0, drop - exponent)
    if symbol >= 254 or exponent >= (1 << exponent_bits) - 2:
        drop = 0
    _require(drop <= mantissa_bits, "value below its step")
    mantissa, sign = fields.take(mantissa_bits - drop) << drop, fields.take(1)
    return sign << exponent_bits + mantissa_bits | exponent << mantissa_bits | mantissa


class _Bits:
    """Bits of bytes in order, the lowest of each byte first; all of them must be asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, bits: int) -> int:
        """The next `bits` of them as a number."""
        first, stop = self.place, self.place + bits
        _require(stop <= 8 * len(self.data), "segment is too short")
        self.place = stop
        return int.from_bytes(self.data[first // 8 : -(-stop // 8)], "little") >> first % 8 & (1 << bits) - 1

    def finish(self) -> None:
        """Nothing but the filling of the last word may be left, and that is zeros."""
        left = 8 * len(self.data) - self.place
        _require(left < 64 and self.take(left) == 0, "segment is too long")


def codes(lengths: Sequence[int]) -> dict[tuple[int, int], int]:
    """The canonical code: symbol by (length, code read as a number with its first bit highest).

    >>> codes([1, 2, 2])
    {(1, 0): 0, (2, 2): 1, (2, 3): 2}
    """
    found, code, last = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - last
        found[length, code] = symbol
        code, last = code + 1, length
    return found


def _stream(data: bytes, count: int, lengths: Sequence[int]) -> Iterator[int]:
    bits, meaning = _Bits(data), codes(lengths)
    for _ in range(count):
        length = code = 0
        while (length, code) not in meaning:
            length, code = length + 1, code << 1 | bits.take(1)
        yield meaning[length, code]
    bits.finish()


def _exponents(symbols: list[int], escapes: bytes, head: Header) -> list[int]:
    """Exponents of `symbols`, and what the escapes stand for put into those."""
    number = symbols.count(255)
    _require(len(escapes) == -(-number // 8) * 8 and not any(escapes[number:]), "escapes")
    raw, exponents = iter(escapes), []
    for i, symbol in enumerate(symbols):
        exponent = next(raw) if symbol == 255 else 0 if symbol == 254 else symbol
        if symbol == 255 and exponent < 254:
            symbols[i] = exponent or 254
        exponents.append(exponent)
        _require(not (head.flush and symbols[i] == 254), "tiny number though it was flushed")
        _require(exponent < 1 << _TYPES[str(head.dtype)][0], "exponent")
    return exponents
