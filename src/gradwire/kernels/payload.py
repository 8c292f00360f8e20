"""Chosen elements as one payload: where the words of places and the values lie.

Places are a list, a bitmap, or coded: Elias and Fano's two planes, with the upper one block-coded.

k ascending, distinct indices i_0 … i_(k-1) of n become v_j = i_j − j, which do not descend, within 0 … n − k.
The `low_bits` b lowest bits of each v_j are written as they are (k·b bits). The rest is a row of
k + ⌊(n − k)/2^b⌋ bits with a one at place (v_j >> b) + j: k ones, and a zero for each step of v_j >> b
(Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, "On the number
of bits required to implement an associative memory", 1971).

That row is cut into blocks of 10 bits, and a block with w ones costs 6 + w bits at most. As the row has k
ones whichever indices are chosen, it fits into 6·blocks + k bits always: the size depends on k and n alone,
which a collective needs. One more bit for a one than for a zero is what an ideal code charges when a third
of the row are ones, since then p(1)/p(0) = 1/2; b is chosen so that this is about right. An ideal code of
that kind takes 10·log2(3/2) + w = 5.85 + w bits a block.

The block code sorts the 1024 patterns by their number of ones (as in enumerative coding: Cover, "Enumerative
source encoding", 1973) and deals them into groups: one that starts with a pattern of t ones takes 2^t
patterns. 59 groups result, numbered by 6 bits, and t bits tell which pattern of the group it is.

Differences from the papers: they keep the upper row as it is, b + 1 + (n − k)/(k·2^b) bits per index. The
block code saves 0.1 to 0.2 of them; without it the size is 1.09 of the entropy at k/n = 10 %, with it 1.055,
and nowhere above 1.075 from k/n = 10^-4 up to the density where a bitmap is shorter. (Of very few indices
the rounding up to words takes more: 1.19 for 22 of 100 000.)

On the wire, low bits, groups' numbers and places in the group are three planes in this order, each from a
whole int32 word on; within a word the lowest bit comes first. Bits that are left over are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 10
"""Bits of the upper row per block."""

GROUP = 6
"""Bits of a group's number."""

MOST_LOW_BITS = 32
"""Most low bits per index. More would not fit the kernels' 64-bit windows, which start at any bit of a 32-bit
word."""

PATTERNS = 1 << BLOCK


@dataclass(frozen=True)
class Planes:
    """Layout of `count` of `numel` indices as Elias and Fano's planes, split at `low_bits` bits.

    >>> planes = Planes(count=100, numel=10_000, low_bits=5)
    >>> planes.row, planes.blocks, planes.words
    (409, 41, 28)
    """

    count: int
    numel: int
    low_bits: int

    @cached_property
    def top(self) -> int:
        """Largest upper part of an index, over all choices of `count` indices."""
        return (self.numel - self.count) >> self.low_bits

    @cached_property
    def row(self) -> int:
        """Bits of the upper row."""
        return self.count + self.top

    @cached_property
    def blocks(self) -> int:
        """Blocks of the upper row; the last one may be padded with zeros."""
        return -(-self.row // BLOCK)

    @cached_property
    def bits(self) -> int:
        """Size in bits of the three planes, before each is rounded up to words."""
        return self.count * (self.low_bits + 1) + GROUP * self.blocks

    @cached_property
    def starts(self) -> tuple[int, int, int]:
        """First word of each plane: low bits, groups' numbers, places in the group."""
        groups = -(-self.count * self.low_bits // 32)
        return 0, groups, groups + -(-GROUP * self.blocks // 32)

    @cached_property
    def words(self) -> int:
        """Size of the three planes in int32 words."""
        return self.starts[2] + -(-self.count // 32)


def _ones(pattern: int) -> list[int]:
    return [bit for bit in range(BLOCK) if pattern >> bit & 1]


ORDER = sorted(range(PATTERNS), key=lambda pattern: (pattern.bit_count(), pattern))
"""All 1024 patterns, ordered by number of ones, then by value."""


def _groups() -> list[tuple[int, int]]:
    """Pair (first position in ORDER, bits t of a place in the group) for each group of patterns."""
    groups, start = [], 0
    while start < PATTERNS:
        bits = ORDER[start].bit_count()
        groups.append((start, bits))
        start += 1 << bits
    assert len(groups) <= 1 << GROUP
    return groups


GROUPS = _groups()

# The last group is larger than what is left for it, and 5 numbers name no group: positions from PATTERNS on
# are read from damaged words only. They stand for the empty pattern, so that a kernel stays within bounds.
END = GROUPS[-1][0] + (1 << GROUPS[-1][1])


def _encoding() -> NDArray[np.uint16]:
    table = np.zeros(PATTERNS, np.uint16)
    for number, (start, bits) in enumerate(GROUPS):
        for place, pattern in enumerate(ORDER[start : start + (1 << bits)]):
            table[pattern] = number | bits << 6 | place << 9
    return table


ENCODING = _encoding()
"""Code of each pattern: group's number (6 bits), t (3 bits), place in the group (7 bits)."""

DECODING = np.full(1 << GROUP, END, np.uint16)
"""Entry of each group's number: first position in ORDER (11 bits), t (3 bits)."""
DECODING[: len(GROUPS)] = [start | bits << 11 for start, bits in GROUPS]

COUNTS = np.zeros(END + 1, np.uint8)
"""Number of ones in the pattern at each position in ORDER."""
COUNTS[:PATTERNS] = [pattern.bit_count() for pattern in ORDER]

ZEROS_BEFORE = np.zeros((END + 1, 16), np.int8)
"""Number of zeros before each one of the pattern at each position in ORDER."""
for _position, _pattern in enumerate(ORDER):
    _zeros = [bit - rank for rank, bit in enumerate(_ones(_pattern))]
    ZEROS_BEFORE[_position, : len(_zeros)] = _zeros


Form = Literal["list", "bitmap", "coded"]
Sound: TypeAlias = bool | Tensor
"""True if packed words are a valid choice of elements. On a device a tensor (): the host waits only if it
reads it."""

S = TypeVar("S", bound=Sound)


def marked(sound: S, mark: Tensor | None) -> S | Literal[True]:
    """`sound`; or, with `mark` (1,) int32, True: the mark becomes 1 unless words are `sound`.

    >>> mark = torch.zeros(1, dtype=torch.int32)
    >>> marked(False, mark), mark, marked(False, None)
    (True, tensor([1], dtype=torch.int32), False)
    """
    if mark is None:
        return sound
    if isinstance(sound, Tensor):
        mark.bitwise_or_(~sound)
    elif not sound:
        mark.fill_(1)
    return True


# The numbers by which `kernels/cpu/chosen.py` knows them.
_FORMS: dict[Form, int] = {"list": 0, "bitmap": 1, "coded": 2}
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def padded(size: int, grain: int) -> int:
    """The next multiple of `grain` from `size` on."""
    return -(-size // grain) * grain


@dataclass(frozen=True)
class Buffer:
    """`words` int32 words, padded to a multiple of 8 bytes, then `count` values of `dtype`, padded to 4.

    The padding aligns the values, and the words of every row where several buffers are the rows of one.

    >>> Buffer(words=3, count=3, dtype=torch.float16).bytes
    24
    """

    words: int
    count: int
    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        """Size, a multiple of 4."""
        return self.start + padded(self.count * self.dtype.itemsize, 4)

    @cached_property
    def start(self) -> int:
        """The byte where values begin."""
        return padded(4 * self.words, 8)

    def parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the words (words,) int32 and the values (count,) of a payload (bytes,) uint8.

        An empty payload must own its memory: a row of an empty buffer has an offset that no view allows.
        """
        stop = self.start + self.count * self.dtype.itemsize
        return payload[: 4 * self.words].view(torch.int32), payload[self.start : stop].view(self.dtype)


@dataclass(frozen=True)
class Shape(Buffer):
    """A buffer whose words are the places of its values, in a `form`. The coded form has `planes`."""

    form: Form
    planes: Planes

    @cached_property
    def is_narrow(self) -> bool:
        """True if indices fit int32 and values have at most 32 bits, as kernels expect."""
        return self.planes.numel <= 2**31 and self.dtype in _TYPES

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """All numbers of the layout as an int64 array, the argument that kernels take fastest."""
        planes = self.planes
        _low, groups, places = planes.starts
        head = (_FORMS[self.form], planes.count, planes.numel, self.words, self.start, _TYPES[self.dtype])
        coded = (planes.low_bits, groups, places, planes.blocks, planes.top, planes.row // 64 + 2)
        return np.array(head + coded, np.int64)
