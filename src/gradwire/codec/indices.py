"""Which elements travel, in the fewer bytes: a list of int32, or one bit per element.

A list costs 32 bits for each of k elements, a bitmap one bit for each of n: above k/n = 1/32 it is shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels import pack_bits, unpack_bits


def _bitmap_words(numel: int) -> int:
    return -(-numel // 32)


def words(count: int, numel: int) -> int:
    """int32 words that carry `count` of `numel` indices.

    >>> words(10, 1000), words(100, 1000)
    (10, 32)
    """
    return min(count, _bitmap_words(numel))


def pack(indices: Tensor, numel: int) -> Tensor:
    """Ascending `indices` (count,) within 0 … numel - 1 as (words,) int32."""
    if indices.numel() <= _bitmap_words(numel):
        return indices.int()
    return pack_bits(indices, _bitmap_words(numel))


def unpack(packed: Tensor, count: int, numel: int) -> Tensor:
    """Ascending indices (count,) int32; raises `WireError` for what `pack` cannot have made.

    Kernels do not check bounds; what comes from a peer is checked here, once. Zeros are what a rank sends
    whose encode has failed: they stand for any valid choice, because its verdict will tell.
    """
    found = packed if count <= _bitmap_words(numel) else unpack_bits(packed, count)
    if count and found.numel() == 0:
        return torch.arange(count, dtype=torch.int32, device=packed.device)
    if found.numel() != count:
        raise WireError(f"a peer sent {found.numel()} indices or more instead of {count}")
    if count and not 0 <= int(found.min()) <= int(found.max()) < numel:
        raise WireError(f"a peer sent indices outside 0 … {numel - 1}")
    return found
