"""Chunks of GComp frames, coded and decoded on the CPU.

`docs/engineering/wire-format.md` describes the layout. `gradwire.codec.gcomp` makes and checks the rest of a
frame. Numbers are bits of float32 as uint32, or 16-bit floats spread over them. Arrays are contiguous and on
the CPU, because frames are sent from there. A frame ends with a checksum. No implementation in plain torch
exists: tests have a slow decoder of whole frames.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.dispatch import OnFirstUse
from gradwire.kernels.huffman import Lookups

cpu = OnFirstUse("gradwire.kernels.cpu.frames")


def checksum(data: Tensor) -> int:
    """XXH64 with seed 0 of the tensor's bytes in order, 0 … 2^64 - 1.

    >>> hex(checksum(torch.tensor([97, 98, 99], dtype=torch.uint8)))
    '0x44bc2cf5ad770999'
    """
    flat = data.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    stored = flat.numpy()
    whole = stored.size // 8 * 8
    return int(cpu.checksum(stored[:whole].view(np.uint64), stored[whole:]))


Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]


class How(NamedTuple):
    """Rules for rounding the numbers of a frame."""

    thresholds: bool
    """True if a `drop` is the exponent of a number's smallest step; False if it is a number of bits."""
    flush: bool
    """True if numbers below the normal range become +0."""
    explicit: bool
    """True if the drop of each number is written to the frame."""
    base: np.uint32
    """Number of lowest mantissa bits of float32 that the floats' own type lacks."""


class Drops(NamedTuple):
    """Dropped precision: one `drop` for all numbers, or `each` (numel,). The unused one is 0 or empty."""

    each: Bytes
    drop: int
    how: How

    @property
    def same(self) -> Bytes:
        """`drop`, repeated for each element of a block."""
        return np.full(cpu.BLOCK, self.drop, np.uint8)

    def of_all(self, numel: int) -> Bytes:
        """Drops of all elements (numel,), whichever way they are given."""
        return self.each if self.each.size else np.full(numel, self.drop, np.uint8)


def round_words(words: Words, drops: Drops) -> Words:
    """Round `words` (numel,) to the words that a receiver decodes."""
    out = np.empty_like(words)
    cpu.round_words(words, drops.of_all(words.size), tuple(drops.how), out)
    return out


def symbols_of(words: Words, drops: Drops) -> Bytes:
    """The symbols (numel,) of `words` (numel,) after rounding."""
    symbols, widths = np.empty((2, words.size), np.uint8)
    fields = np.empty(words.size, np.uint32)
    cpu.split(words, drops.of_all(words.size), tuple(drops.how), symbols, widths, fields)
    return symbols


def encode_chunks(
    words: Words,
    drops: Drops,
    here: slice,
    lookups: Lookups,
    chunk: int,
    out: NDArray[np.uint64],
    directory: NDArray[np.uint16],
    counts: NDArray[np.int64],
) -> int:
    """Encode words[here] in chunks of `chunk` numbers.

    Args:
        words, drops: uint32 (numel,), bits of the numbers, and their dropped precision.
        here: slice of `words` to encode.
        lookups: tables of the Huffman code.
        chunk: numbers per chunk.
        out: uint64, written; large enough for all chunks stored raw. A chunk that coding would enlarge is
            stored raw.
        directory: uint16 (chunks, 8), written: a row of sizes per chunk.
        counts: int64 (4, 256), to which symbols are counted; or (0, 256) to count none.

    Returns the number of words written.
    """
    how = tuple(drops.how)
    used = cpu.encode_chunks(
        words[here], drops.each[here], drops.same, how, lookups.encoding, chunk, out, directory, counts
    )
    return int(used)


def decode_chunks(
    words: NDArray[np.uint64],
    place: int,
    directory: NDArray[np.uint16],
    chunk: int,
    drops: Drops,
    here: slice,
    lookups: Lookups,
    out: Words,
    add: bool,
) -> int:
    """Decode chunks into out[here], or with `add` add them to its float32 numbers.

    Args:
        words: uint64, the frame, with three more words after the last segment.
        place: number of the first chunk's first word.
        directory: uint16 (chunks, 8), sizes of the segments; the caller has checked that they lie within
            `words`.
        chunk: numbers per chunk.
        drops: dropped precision, unless the frame has it.
        here: slice of `out` to write.
        lookups: tables of the Huffman code.
        out: uint32 (numel,), bits of the numbers.
        add: True to add instead of overwriting.

    Returns the number of the first damaged chunk, or -1.
    """
    bits = out[here]
    arrays = drops.each[here], drops.same, tuple(drops.how), lookups.decoding, bits, bits.view(np.float32)
    return int(cpu.decode_chunks(words, np.uint64(place), directory, chunk, *arrays, add))
