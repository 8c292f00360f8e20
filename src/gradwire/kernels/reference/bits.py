"""Codes of a few bits in a row of bytes, in plain torch: the oracle of every kernel that packs.

Code i takes bits i · width to (i + 1) · width - 1 of the row; bit b is bit b mod 8 of byte b div 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.layouts import packed_bytes


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """`codes` (count,), integers of `width` bits, as (packed_bytes,) uint8, the last byte filled with zeros.

    >>> pack_codes(torch.tensor([1, 2, 3]), 2)
    tensor([57], dtype=torch.uint8)
    """
    bits = (codes.long()[:, None] >> torch.arange(width, device=codes.device)) & 1
    row = torch.zeros(8 * packed_bytes(codes.numel(), width), dtype=torch.int64, device=codes.device)
    row[: bits.numel()] = bits.reshape(-1)
    places = torch.arange(8, device=codes.device)
    return (row.view(-1, 8) << places).sum(1).to(torch.uint8)


def unpack_codes(packed: Tensor, width: int, count: int) -> Tensor:
    """The codes (count,) int64 that `pack_codes` packed.

    >>> unpack_codes(torch.tensor([57], dtype=torch.uint8), 2, 3)
    tensor([1, 2, 3])
    """
    bits = (packed.long()[:, None] >> torch.arange(8, device=packed.device)) & 1
    row = bits.reshape(-1)[: count * width].view(count, width)
    return (row << torch.arange(width, device=packed.device)).sum(1)
