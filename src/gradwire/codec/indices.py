"""The indices of elements in the fewest bytes: a list, one bit per element, or Elias-Fano coded.

A list costs 32 bits for each of k elements and is for a handful of them. A bitmap costs one bit for each of n
and is shortest above k/n = 0.4. Between them indices are coded, within 1.08 of the entropy log2 C(n, k). Each
has a size that depends on k and n alone, so that all ranks know it.

The coded layout, its arithmetic and its sources are in `gradwire.kernels.payload`. Coding the gaps between
indices by Golomb's or Rice's code (Golomb, "Run-length encodings", 1966; Rice, "Some practical universal
noiseless coding techniques", 1979) takes 0.96 to 0.99 of this size on random indices. But its length depends
on the indices, so that all ranks would have to agree on it first, or reserve the longest.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels.chosen import pack_elias_fano, unpack_elias_fano
from gradwire.kernels.payload import MOST_LOW_BITS, Form, Planes, Sound
from gradwire.kernels.places import choice, index_type, pack_bits, unpack_bits
from gradwire.unit.context import See, refuse


def _sizes(count: int, numel: int) -> dict[Form, int]:
    """Size of each possible form in int32 words. Of equal ones the first is the fastest to read."""
    sizes: dict[Form, int] = {"list": count} if index_type(numel) == torch.int32 else {}
    return {**sizes, "bitmap": -(-numel // 32), "coded": elias_fano_planes(count, numel).words}


@lru_cache(maxsize=4096)
def index_form(count: int, numel: int) -> Form:
    """Shortest form for `count` of `numel` indices.

    >>> index_form(2, 1000), index_form(100, 1000), index_form(500, 1000)
    ('list', 'coded', 'bitmap')
    """
    sizes = _sizes(count, numel)
    return min(sizes, key=lambda name: sizes[name])


@lru_cache(maxsize=4096)
def index_words(count: int, numel: int) -> int:
    """int32 words that carry `count` of `numel` indices.

    >>> index_words(2, 1000), index_words(100, 1000), index_words(500, 1000)
    (2, 18, 32)
    """
    return min(_sizes(count, numel).values())


@lru_cache(maxsize=4096)
def elias_fano_planes(count: int, numel: int) -> Planes:
    """Layout of coded indices, with the number of low bits that makes it smallest.

    >>> layout = elias_fano_planes(count=10_000, numel=1_000_000)
    >>> layout.low_bits, layout.words
    (5, 2644)
    """
    choices = (Planes(count, numel, low_bits) for low_bits in range(MOST_LOW_BITS + 1))
    return min(choices, key=lambda layout: layout.bits)


def pack_indices(indices: Tensor, numel: int) -> Tensor:
    """Pack ascending, distinct `indices` (count,) within 0 … numel - 1 into (words,) int32, in the shortest
    form.

    >>> pack_indices(torch.tensor([3, 5]), 1000)
    tensor([3, 5], dtype=torch.int32)
    """
    form = index_form(indices.numel(), numel)
    if form == "list":
        return indices.int()
    if form == "bitmap":
        return pack_bits(indices, -(-numel // 32))
    return pack_elias_fano(indices, elias_fano_planes(indices.numel(), numel))


def unpack_indices(
    packed: Tensor, count: int, numel: int, see: See = refuse, mark: Tensor | None = None
) -> Tensor:
    """Unpack ascending indices (count,): int32 if numel ≤ 2^31, else int64. Raises `WireError` if `packed`
    has another size than `index_words(count, numel)`.

    Indices from a peer are checked here, once, because kernels check no bounds. If they are invalid, 0 …
    count - 1 are returned, and `see` is told; by default it raises `WireError`. A kernel that has a `mark`
    sets that instead (`ExchangeContext.mark`). Zeros are accepted, as by `see_choice`.

    >>> unpack_indices(torch.tensor([3, 5], dtype=torch.int32), 2, 1000)
    tensor([3, 5], dtype=torch.int32)
    """
    if packed.numel() != (words := index_words(count, numel)):
        raise WireError(f"{count} of {numel} indices take {words} words, not {packed.numel()}")
    form = index_form(count, numel)
    if form == "coded":
        # Which looks for zeros.
        found, sound = unpack_elias_fano(packed, elias_fano_planes(count, numel), mark)
        if sound is not True:
            is_heard = sound if isinstance(sound, Tensor) else torch.tensor(sound, device="cpu")
            see(is_heard, no_choice(count, numel))
        return found
    found, sound = (packed, True) if form == "list" else unpack_bits(packed, count)
    found, sound = choice(found, sound, numel)
    see_choice(sound, packed, count, numel, see)
    return found


def see_choice(sound: Sound, packed: Tensor, count: int, numel: int, see: See) -> None:
    """Tell `see` if `packed` is no valid choice of `count` of `numel` indices.

    A damaged word may still be another valid choice. Zeros are accepted: a rank whose encoder has failed
    sends them, and its row of the status vote tells.
    """
    if sound is not True:
        see(sound | ~packed.any(), no_choice(count, numel))


def no_choice(count: int, numel: int) -> str:
    """Message for a peer's words that are no valid choice."""
    return f"a peer sent words that stand for no choice of {count} of {numel} indices"
