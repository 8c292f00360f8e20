"""k of n indices in little more than log2 C(n, k) bits, and always in the same number of them.

The layout, its arithmetic and its sources are in `gradwire.kernels.elias_fano`. Coding the gaps between
indices by Golomb's or Rice's code (Golomb, "Run-length encodings", 1966; Rice, "Some practical universal
noiseless coding techniques", 1979) takes 0.96 to 0.99 of this size on random indices; but its length depends
on the indices, so that all ranks would have to agree on it first, or reserve the longest.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from gradwire.kernels import Planes, pack_elias_fano, unpack_elias_fano
from gradwire.kernels.elias_fano import BLOCK, GROUP, MOST_LOW_BITS


@lru_cache(maxsize=4096)
def planes(count: int, numel: int) -> Planes:
    """The layout with the number of low bits that makes it smallest.

    >>> planes(count=10_000, numel=1_000_000).low_bits
    5
    """
    choices = (Planes(count, numel, low_bits) for low_bits in range(MOST_LOW_BITS + 1))
    return min(choices, key=lambda layout: layout.bits)


def bits_per_index(density: float) -> float:
    """Bits for each of k of n indices, k/n = `density` in (0, 1], when n is large.

    >>> round(bits_per_index(0.01), 3), round(bits_per_index(0.1), 3)
    (8.456, 4.95)
    """
    zeros = 1.0 / density - 1.0
    return min(b + 1 + GROUP / BLOCK * (1 + zeros / 2.0**b) for b in range(MOST_LOW_BITS + 1))


def words(count: int, numel: int) -> int:
    """int32 words that `pack` makes.

    >>> words(10_000, 1_000_000)
    2644
    """
    return planes(count, numel).words


def pack(indices: Tensor, numel: int) -> Tensor:
    """Ascending, distinct `indices` (count,) within 0 … numel - 1 as (words,) int32."""
    return pack_elias_fano(indices, planes(indices.numel(), numel))


def unpack(packed: Tensor, count: int, numel: int) -> Tensor | None:
    """Ascending, distinct indices (count,) within 0 … numel - 1, or None for what `pack` cannot have made.

    Only what makes no such indices is noticed: a damaged word may well stand for other ones.
    """
    return unpack_elias_fano(packed, planes(count, numel))
