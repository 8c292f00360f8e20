"""Two bits per element: its sign, and whether its magnitude is low or high in its block. For chosen elements.

SparseLoCo (Sarfi, Thérien, Lidin and Belilovsky 2025, "Communication efficient LLM pre-training with
SparseLoCo", arXiv 2508.15706) sends its chosen values in two bits. Code of its authors quantizes by
statistics: bins around the mean of a tensor, whose width is a number of standard deviations, are decoded as
the mean of their elements. `docs/local-steps.md` says how much of it could be checked.

Differences: chosen elements have magnitudes far from 0, so that a bin around 0 would stay empty. Here one bit
is the sign, and the other tells the halves of the range of magnitudes in a block. The means of both halves
travel, as there; a block is 64 elements, not a tensor. On the largest 64 of every 4096 numbers, over 512 such
chunks, this leaves 0.5 % of the squared norm of normal numbers, and 6 % of Student's t with 3 degrees of
freedom. Four bins of 1.5 standard deviations leave 1.3 % and 36 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.scales import ScaledPayload
from gradwire.kernels.layouts import Blocks, packed_bytes, scale_type
from gradwire.kernels.levels import add_levels, encode_levels
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class FourLevels:
    """Blocks of at most `block` elements of a part, each as one of ±low and ±high, two numbers per block.

    Low and high are the means of the magnitudes below and above the middle of their range in the block. The
    payload is the levels, low before high (float32; float64 for float64), then the codes of 2 bits, the first
    in the lowest bits, each part from a byte of its own, filled up with zeros to whole levels.

    With means as levels, what is left is ‖x‖² without the squared norm of what the levels say: never more
    than came. In a block with a 0 the low level is 0, so that what is 0 stays 0, and what is low waits. Of n
    elements, at most a share γ is left: 0.17, 0.37, 0.61 for n = 4, 16, 64, and with a 0 among them
    (n − 2)/(n + 2), which is 0.33, 0.78, 0.94 (`docs/engineering/laws.md`). A block with NaN or Inf decodes
    to NaN throughout.
    """

    block: int
    laws = Laws(contractive=True, total=True, stays_on_device=True, fixed_rounds=True)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return ctx.once(self._layout, numel, dtype)[1].bytes, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._encode(x, ctx, leave=False)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._encode(x, ctx, leave=True)

    def _encode(self, x: Tensor, ctx: ExchangeContext, leave: bool) -> Tensor:
        blocks, layout = ctx.once(self._layout, x.numel(), x.dtype)
        payload = layout.empty(x.device)
        levels, codes = layout.split(payload)
        ctx.kernels[encode_levels](x, blocks, levels.view(-1, 2), codes, leave=leave)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        blocks, layout = ctx.once(self._layout, out.numel(), out.dtype)
        levels, codes = layout.split(payload)
        ctx.kernels[add_levels](levels.view(-1, 2), codes, blocks, out, weight)

    def _layout(self, ctx: ExchangeContext, numel: int, dtype: torch.dtype) -> tuple[Blocks, ScaledPayload]:
        sizes = ctx.sizes(numel)
        blocks, code_bytes = Blocks(sizes, self.block), sum(packed_bytes(size, 2) for size in sizes)
        return blocks, ScaledPayload(2 * blocks.count, code_bytes, scale_type(dtype))


def four_levels(block: int = 64) -> FourLevels:
    """Send every element in 2 bits, and two numbers per `block` elements, a multiple of 8.

    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> x = torch.tensor([3.0, -8.0, 1.0])
    >>> payload = four_levels().take(x, ctx)
    >>> payload.numel(), x
    (12, tensor([ 1.,  0., -1.]))
    """
    Blocks((), block)  # raises for a block of a size that does not do
    return FourLevels(block)
