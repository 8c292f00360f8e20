"""One bit per element, and what ones and zeros stand for in each block: the payload of `sign` and `one_bit`.

Layout, in bytes: the levels, block by block, in float32 (float64 for float64), then the bits of x >= 0,
lowest first, each part from a byte of its own, filled with zeros to a multiple of the size of a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codec.base import CodecLaws
from gradwire.kernels import Blocks, add_signs, pack_signs
from gradwire.moment import Moment


@dataclass(frozen=True)
class TwoLevels:
    """Blocks of `block` elements of a part, or whole parts; `levels` numbers each say what its bits mean.

    A block of zeros is sent as zeros; NaN or Inf spreads to its block.
    """

    block: int | None = None
    levels: ClassVar[int] = 1
    laws = CodecLaws(contractive=True, covers=True)

    def __post_init__(self) -> None:
        Blocks((), self.block)  # raises for a block of a size that does not do

    def payload(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[int, torch.dtype]:
        """Bytes."""
        blocks, itemsize = self._blocks(numel, at), _level_type(dtype).itemsize
        bits = -(-blocks.bytes // itemsize) * itemsize  # so that every row of a gathered payload is aligned
        return blocks.count * self.levels * itemsize + bits, torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        return self._pack(x, at, leave=False)

    def take(self, x: Tensor, at: Moment) -> Tensor:
        """Two passes over x, or one where blocks stay in the caches."""
        return self._pack(x, at, leave=True)

    def _pack(self, x: Tensor, at: Moment, leave: bool) -> Tensor:
        blocks, (size, dtype) = self._blocks(x.numel(), at), self.payload(x.numel(), x.dtype, at)
        payload = torch.zeros(size, dtype=dtype, device=x.device)
        pack_signs(x, blocks, *self._read(payload, blocks, x.dtype), leave=leave)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        blocks = self._blocks(out.numel(), at)
        add_signs(*self._read(payload, blocks, out.dtype), blocks, out, weight)

    def _blocks(self, numel: int, at: Moment) -> Blocks:
        return _cut(at.sizes(numel), self.block)

    def _read(self, payload: Tensor, blocks: Blocks, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Levels (blocks, levels) and bits (bytes,) uint8, both as views."""
        start = blocks.count * self.levels * _level_type(dtype).itemsize
        levels = payload[:start].view(_level_type(dtype)).view(blocks.count, self.levels)
        return levels, payload[start : start + blocks.bytes]


@lru_cache(maxsize=4096)  # what a unit is made of is the same in every step
def _cut(sizes: tuple[int, ...], block: int | None) -> Blocks:
    return Blocks(sizes, block)


def _level_type(dtype: torch.dtype) -> torch.dtype:
    """The mean of a few float16 may be one, but that of many needs more than their eleven bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32
