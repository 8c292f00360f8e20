"""Which elements travel, in the fewest bytes: a list, one bit per element, or coded.

A list costs 32 bits for each of k elements and is for a handful of them; a bitmap costs one bit for each of n
and is shortest above k/n = 0.4; between them indices are coded (`gradwire.codec.elias_fano`), within 1.08 of
the entropy log2 C(n, k). Each has a size that depends on k and n alone, so that all ranks know it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codec import elias_fano
from gradwire.errors import WireError
from gradwire.kernels import Form, index_type, pack_bits, unpack_bits


def _sizes(count: int, numel: int) -> dict[Form, int]:
    """int32 words of each form that there is; where two are equal, the first is the cheaper to read."""
    sizes: dict[Form, int] = {"list": count} if index_type(numel) == torch.int32 else {}
    return {**sizes, "bitmap": -(-numel // 32), "coded": elias_fano.words(count, numel)}


@lru_cache(maxsize=4096)
def form(count: int, numel: int) -> Form:
    """The form in which `count` of `numel` indices are shortest.

    >>> form(2, 1000), form(100, 1000), form(500, 1000)
    ('list', 'coded', 'bitmap')
    """
    sizes = _sizes(count, numel)
    return min(sizes, key=lambda name: sizes[name])


@lru_cache(maxsize=4096)
def words(count: int, numel: int) -> int:
    """int32 words that carry `count` of `numel` indices.

    >>> words(2, 1000), words(100, 1000), words(500, 1000)
    (2, 18, 32)
    """
    return min(_sizes(count, numel).values())


def bits_per_index(density: float) -> float:
    """Bits for each of k of n indices, k/n = `density` in (0, 1], when n is large but below 2^31.

    >>> bits_per_index(0.5), round(bits_per_index(0.01), 3)
    (2.0, 8.456)
    """
    return min(32.0, 1.0 / density, elias_fano.bits_per_index(density))


def pack(indices: Tensor, numel: int) -> Tensor:
    """Ascending, distinct `indices` (count,) within 0 … numel - 1 as (words,) int32.

    >>> pack(torch.tensor([3, 5]), 1000)
    tensor([3, 5], dtype=torch.int32)
    """
    chosen = form(indices.numel(), numel)
    if chosen == "list":
        return indices.int()
    if chosen == "bitmap":
        return pack_bits(indices, -(-numel // 32))
    return elias_fano.pack(indices, numel)


def unpack(packed: Tensor, count: int, numel: int) -> Tensor:
    """Ascending indices (count,), int32 if numel ≤ 2^31, else int64.

    Kernels do not check bounds; what comes from a peer is checked here, once: `WireError` for words that
    stand for no choice of `count` of `numel`. Zeros are what a rank sends whose encode has failed: they stand
    for any choice, because its verdict will tell.

    >>> unpack(torch.tensor([3, 5], dtype=torch.int32), 2, 1000)
    tensor([3, 5], dtype=torch.int32)
    """
    if packed.numel() != words(count, numel):
        raise WireError(f"{count} of {numel} indices take {words(count, numel)} words, not {packed.numel()}")
    found = _unpacked(packed, count, numel)
    if found is not None:
        return found
    if packed.any():
        raise WireError(f"a peer sent words that stand for no choice of {count} of {numel} indices")
    return torch.arange(count, dtype=index_type(numel), device=packed.device)


def _unpacked(packed: Tensor, count: int, numel: int) -> Tensor | None:
    chosen = form(count, numel)
    if chosen == "coded":
        return elias_fano.unpack(packed, count, numel)
    if chosen == "list":
        return packed if count == 0 or _ascends(packed, numel) else None
    found = unpack_bits(packed, count)
    # Ones ascend by themselves, and only those beyond the end are too large.
    good = found.numel() == count and (count == 0 or int(found[-1]) < numel)
    return found if good else None


def _ascends(found: Tensor, numel: int) -> bool:
    return bool((found.diff() > 0).all()) and int(found[0]) >= 0 and int(found[-1]) < numel
