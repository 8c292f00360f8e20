"""Signs: one bit per element, and what ones and zeros stand for in each block.

- `Sign` sends the mean magnitude. Karimireddy, Rebjock, Stich and Jaggi 2019, "Error feedback fixes SignSGD
  and other gradient compression schemes", algorithm 1: C(x) = ‖x‖₁/d · sign(x), layer by layer. It leaves
  ‖x‖² − ‖x‖₁²/d, that is a share γ = 1 − ‖x‖₁²/(d‖x‖²) of the squared norm (lemma 8), which is 0.36 for
  normal numbers, and never above 1 − 1/d, because ‖x‖₁ ≥ ‖x‖.
- `OneBit` sends the mean of either side. Seide, Fu, Droppo, Li and Yu 2014, "1-bit stochastic gradient
  descent and its application to data-parallel distributed training of speech DNNs", section 3.2: with the
  threshold at 0, each side is sent as its own mean, which makes the squared error as small as two values can.
  Per block it leaves ‖x‖² − (S₊²/n₊ + S₋²/n₋), S and n being the sum and the number of either side. By
  Cauchy-Schwarz S₊²/n₊ + S₋²/n₋ ≥ ‖x‖₁²/d, so it leaves no more than `Sign` does, and γ ≤ 1 − 1/d.

The payload, in bytes: the levels, block by block, in float32 (float64 for float64), then the bits of x >= 0,
lowest first, each part from a byte of its own, filled with zeros to a multiple of the size of a level.

Differences from the papers: 0 counts as positive, since one bit has no room for a third value, and error
feedback takes that back; a whole part of zeros is sent as zeros. Levels are per parameter or per `block` of
one. That is finer than per unit, wherever a unit holds several parameters. It is coarser than per column of a
matrix, as in `OneBit`'s paper, because units may end within a column; but with the length of a row as block,
every row of a matrix (a neuron's weights) that starts its part has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.kernels.layouts import Blocks
from gradwire.kernels.signs import add_signs, pack_signs
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class TwoLevels:
    """Codec of signs with `levels` numbers per block of `block` elements, or per whole part.

    A block of zeros is sent as zeros. NaN or Inf spreads to its block.
    """

    block: int | None = None
    levels: ClassVar[int] = 1
    laws = Laws(contractive=True, covers=True, total=True, stays_on_device=True, fixed_rounds=True)

    def __post_init__(self) -> None:
        Blocks((), self.block)  # raises for a block of a size that does not do

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        blocks, itemsize = self._blocks(numel, ctx), _level_type(dtype).itemsize
        bits = -(-blocks.bytes // itemsize) * itemsize  # so that every row of a gathered payload is aligned
        return blocks.count * self.levels * itemsize + bits, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._pack(x, ctx, leave=False)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Encode, and leave the rounding errors in x: two passes over x, or one if blocks stay in the
        caches.
        """
        return self._pack(x, ctx, leave=True)

    def _pack(self, x: Tensor, ctx: ExchangeContext, leave: bool) -> Tensor:
        blocks, (size, dtype) = self._blocks(x.numel(), ctx), self.payload(x.numel(), x.dtype, ctx)
        payload = torch.zeros(size, dtype=dtype, device=x.device)
        ctx.kernels[pack_signs](x, blocks, *self._read(payload, blocks, x.dtype), leave=leave)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        blocks = self._blocks(out.numel(), ctx)
        ctx.kernels[add_signs](*self._read(payload, blocks, out.dtype), blocks, out, weight)

    def _blocks(self, numel: int, ctx: ExchangeContext) -> Blocks:
        return _cut(ctx.sizes(numel), self.block)

    def _read(self, payload: Tensor, blocks: Blocks, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Views of a payload: levels (blocks, levels) and bits (bytes,) uint8."""
        start = blocks.count * self.levels * _level_type(dtype).itemsize
        levels = payload[:start].view(_level_type(dtype)).view(blocks.count, self.levels)
        return levels, payload[start : start + blocks.bytes]


@lru_cache(maxsize=4096)  # what a unit is made of is the same in every step
def _cut(sizes: tuple[int, ...], block: int | None) -> Blocks:
    return Blocks(sizes, block)


def _level_type(dtype: torch.dtype) -> torch.dtype:
    """Type of levels: float64 for float64, else float32, because a mean needs more bits than float16 has."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Sign(TwoLevels):
    """Codec of signs with the mean magnitude of each block or part: γ ≤ 1 − 1/d, d the elements of the
    largest.

    It takes 1 bit per element and 32 per block: 1/8 of a byte, and 4/`block` bytes.
    """


def sign(block: int | None = None) -> Sign:
    """Send signs, with one scale per parameter, or per `block` elements of one: a multiple of 8.

    Smaller blocks follow the gradient more closely, and cost 32/`block` bits more per element.

    >>> import torch
    >>> from gradwire.unit.context import ExchangeContext
    >>> x, ctx = torch.tensor([1.0, -2.0, 6.0]), ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> payload = sign().take(x, ctx)
    >>> payload.numel(), x
    (8, tensor([-2.,  1.,  3.]))
    """
    return Sign(block)


@dataclass(frozen=True)
class OneBit(TwoLevels):
    """Codec of signs with two means per block or part, of elements >= 0 and of the others: γ ≤ 1 − 1/d.

    It takes 1 bit per element and 64 per block.
    """

    levels: ClassVar[int] = 2


def one_bit(block: int | None = None) -> OneBit:
    """Send signs, with two means per parameter, or per `block` elements of one: a multiple of 8.

    >>> import torch
    >>> from gradwire.unit.context import ExchangeContext
    >>> x, ctx = torch.tensor([1.0, -2.0, 6.0]), ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> payload = one_bit().take(x, ctx)
    >>> payload.numel(), x
    (12, tensor([-2.5000,  0.0000,  2.5000]))
    """
    return OneBit(block)
