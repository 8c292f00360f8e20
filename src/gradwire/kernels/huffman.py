"""Length-limited canonical Huffman codes of bytes, and four streams of them.

Symbols are bytes, and lengths (256,) uint8 tell a code from every other: 0 is a symbol without a code, which
is written as that of `ESCAPE`. Codes are canonical (Connell 1973, "A Huffman-Shannon-Fano code"): shorter
ones first, of equal length in the order of symbols. The first bit of a code is the lowest of a word.

Two look-ups make it fast. Encoding takes two symbols at a time from a table of all pairs. Decoding takes a
window of as many bits as the longest code has and finds all codes, up to seven, that end within it (as the
double-symbol decoder of zstd's huff0 does for two); and it reads four streams in turn, so that one does not
wait for the other's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.dispatch import OnFirstUse

cpu = OnFirstUse("gradwire.kernels.cpu.huffman")

SYMBOLS = 256
ESCAPE = 255
LONGEST = 12
"""Bits of the longest code. Five look-ups of that many fit into a 64-bit window."""


def canonical_codes(lengths: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Canonical codes (256,) uint32, first bit lowest, for code `lengths` (256,) that make up a complete
    code.

    >>> lengths = np.zeros(256, np.uint8)
    >>> lengths[[0, 9, 255]] = 1, 2, 2
    >>> [format(code, "b") for code in canonical_codes(lengths)[[0, 9, 255]]]
    ['0', '1', '11']
    """
    codes, code, length = np.zeros(SYMBOLS, np.uint32), 0, 0
    for symbol in np.lexsort((np.arange(SYMBOLS), lengths)):
        if lengths[symbol]:
            code <<= int(lengths[symbol]) - length
            length = int(lengths[symbol])
            codes[symbol] = int(format(code, f"0{length}b")[::-1], 2)
            code += 1
    return codes


@dataclass(frozen=True, eq=False)
class Lookups:
    """Tables for encoding (0.3 MB) and decoding (at most 32 KiB) with one code, each made on first use."""

    lengths: NDArray[np.uint8]

    @cached_property
    def escaped(self) -> NDArray[np.bool_]:
        """True for each symbol (256,) that has no code of its own, and is written as `ESCAPE`."""
        escaped: NDArray[np.bool_] = self.lengths == 0
        escaped[ESCAPE] = True
        return escaped

    @cached_property
    def singles(self) -> NDArray[np.uint32]:
        """Entry (256,) for each symbol: length of the code that is written, whether it is escaped, and
        the code.
        """
        written = np.where(self.lengths == 0, ESCAPE, np.arange(SYMBOLS))
        entries = canonical_codes(self.lengths)[written] << 6 | self.lengths[written]
        return (entries | self.escaped.astype(np.uint32) << 5).astype(np.uint32)

    @cached_property
    def encoding(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.bool_]]:
        """Tables for encoding: of pairs of symbols, of single symbols, and which symbols are escaped."""
        pairs = np.empty(1 << 16, np.uint32)
        cpu.fill_pairs(self.singles, pairs)
        return pairs, self.singles, self.escaped

    @cached_property
    def decoding(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Tables for decoding: symbols at the start of each window, and code lengths of symbols."""
        bits = int(self.lengths.max())
        windows = np.empty(1 << bits, np.uint64)
        cpu.fill_windows(self.singles, self.lengths, bits, windows)
        return windows, self.lengths


def count_symbols(symbols: Tensor) -> Tensor:
    """The counts of each byte in uint8 `symbols` (n,): int64 (256,).

    >>> count_symbols(torch.tensor([3, 3, 1], dtype=torch.uint8))[:4]
    tensor([0, 1, 0, 2])
    """
    counts = np.zeros((4, SYMBOLS), np.int64)
    cpu.count_symbols(symbols.numpy(), counts)
    return torch.from_numpy(counts.sum(0))


def encode_symbols(
    symbols: Tensor, lookups: Lookups, room: Tensor | None = None
) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Encode uint8 `symbols` (n,) as four Huffman streams.

    Args:
        symbols: uint8 (n,). Symbols without a code are written as `ESCAPE`, and their values are lost.
        lookups: tables of the code.
        room: int64, `encoded_words(n)` words or more, to write to; by default new memory.

    Returns (int64 words, a view of `room` if given; the number of words of each of the four streams).

    Raises `ValueError` if `room` is too small.

    >>> lengths = np.zeros(256, np.uint8)
    >>> lengths[[0, 9, 255]] = 1, 2, 2
    >>> words, sizes = encode_symbols(torch.tensor([0, 9, 0, 9], dtype=torch.uint8), Lookups(lengths))
    >>> words, sizes
    (tensor([18]), (1, 0, 0, 0))
    """
    count = symbols.numel()
    padded = symbols if count % 4 == 0 else torch.nn.functional.pad(symbols, (0, -count % 4))
    room = torch.empty(encoded_words(count), dtype=torch.int64, device="cpu") if room is None else room
    if room.numel() < encoded_words(count):
        raise ValueError(f"{count} symbols need room for {encoded_words(count)} words, not {room.numel()}")
    marks, data = np.empty(count // 4 + 1, np.int32), room.numpy().view(np.uint8)
    q, places = cpu.quarter(count), [np.uint64(0)]
    for k in range(4):
        start, stop = min(k * q, count), min(k * q + q, count)
        place, _ = cpu.encode_stream(
            padded.numpy(), start, stop, *lookups.encoding[:2], data, places[-1], marks, np.uint64(0)
        )
        places.append(np.uint64(place))
    a, b, c, d, e = (int(place) // 8 for place in places)
    return room[:e], (b - a, c - b, d - c, e - d)


def encoded_words(count: int) -> int:
    """Words to allocate for `count` encoded symbols: the longest result, and the words that the kernel writes
    beyond it.

    >>> encoded_words(1000)
    193
    """
    return count * LONGEST // 64 + 6


def decode_symbols(
    words: Tensor, sizes: tuple[int, int, int, int], count: int, lookups: Lookups, out: Tensor | None = None
) -> Tensor | None:
    """Decode `count` symbols that `encode_symbols` encoded.

    Args:
        words: int64, four streams one after another.
        sizes: words of each stream.
        count: number of symbols.
        lookups: tables of the Huffman code.
        out: uint8 (count,), written; `None` allocates it.

    Returns the symbols (count,), or `None` if the words are not four valid streams. Raises `ValueError` if
    `out` has another shape.

    >>> lengths = np.zeros(256, np.uint8)
    >>> lengths[[0, 9, 255]] = 1, 2, 2
    >>> decode_symbols(torch.tensor([18]), (1, 0, 0, 0), 4, Lookups(lengths))
    tensor([0, 9, 0, 9], dtype=torch.uint8)
    """
    if min(sizes) < 0 or sum(sizes) != words.numel():
        return None
    out = torch.empty(count, dtype=torch.uint8, device="cpu") if out is None else out
    if out.shape != (count,):
        raise ValueError(f"{count} symbols do not fit into {tuple(out.shape)}")
    padded = np.zeros(words.numel() + 2, np.uint64)  # the kernel reads two more
    padded[:-2] = words.numpy().view(np.uint64)
    ends = np.cumsum([0, *sizes]).astype(np.uint64)
    found = cpu.decode_streams(padded, ends, *lookups.decoding, out.numpy(), count)
    return out if found else None
