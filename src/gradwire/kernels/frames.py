"""Whole chunks of a GComp frame, coded and decoded on the CPU.

`docs/engineering/wire-format.md` is the layout.

`gradwire.codec.gcomp` makes and checks what is around them. Numbers are float32's bits as uint32, or those of
16-bit floats spread over them. Arrays are contiguous and in the CPU's memory, because frames are sent from
there. A frame ends with a checksum. There is no reference beside it: the tests have a slow decoder of whole
frames.
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
    """The rules by which numbers are cut."""

    thresholds: bool
    """Whether a number's drop is the exponent of its smallest step, and not a number of bits."""
    flush: bool
    """Whether what is below the normal range becomes +0."""
    explicit: bool
    """Whether the drop of each number travels."""
    base: np.uint32
    """Lowest bits of a float32's mantissa that the type does not have."""


class Drops(NamedTuple):
    """How much is dropped: one `drop` for all, or `each` (numel,); the other is 0 or empty."""

    each: Bytes
    drop: int
    how: How

    @property
    def same(self) -> Bytes:
        """`drop` for each element of a block."""
        return np.full(cpu.BLOCK, self.drop, np.uint8)

    def of_all(self, numel: int) -> Bytes:
        """(numel,) for each element."""
        return self.each if self.each.size else np.full(numel, self.drop, np.uint8)


def round_words(words: Words, drops: Drops) -> Words:
    """The words that a receiver gets for `words` (numel,)."""
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
    """Code words[here] in chunks of `chunk` into `out`; how many words that takes.

    Each chunk fills a row of `directory` (chunks, 8). One that would grow is stored raw, so `out` has room
    for all of them raw. Symbols are counted in `counts` (4, 256), unless that is (0, 256).
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
    """Decode chunks from word `place` on into out[here], or with `add` add them to what it holds as float32.

    Returns the number of the first chunk that is none, or -1. The rows of `directory` (chunks, 8) must lie
    within `words`, with three more words after the last segment: the caller has checked that.
    """
    bits = out[here]
    arrays = drops.each[here], drops.same, tuple(drops.how), lookups.decoding, bits, bits.view(np.float32)
    return int(cpu.decode_chunks(words, np.uint64(place), directory, chunk, *arrays, add))
