"""The upper bits of float32 travel, and the rest of the mantissa is cut off. Without error feedback the
result is biased: 1 % of the magnitude is lost at 18 bits, twice.

Li et al. 2024, "Near-lossless gradient compression for data-parallel distributed DNN training": the
baseline of GComp, which drops 18 of 23 bits of mantissa.

Differences from the paper:

- What is kept is packed without a gap, 14 bits of 32.
- It is summed in float32 between an all-to-all and an all-gather (`gradwire.exchange.scatter_reduce`); the
  paper does not say where it cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.truncation import add_upper, pack_upper, upper_words
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.recipes.low_bits import rounded
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class Truncate:
    """Codec that drops the lowest `bits` bits of float32's mantissa, which rounds towards zero.

    The error of an element is less than 2^(bits − 23)·|x|, and less than 2^(bits − 149) below the normal
    range. So the squared error of n elements is at most 4^(bits − 23) of their squared norm, plus n·4^(bits −
    149). The codec is biased: with uniformly distributed mantissas the magnitude shrinks by 2^(bits − 24)/1.5
    in the mean, 1 % at 18 bits. Averages over ranks or steps do not remove this bias; error feedback does.

    NaN and Inf arrive as such. float64 is rounded to float32 first; larger numbers become its largest one.
    """

    bits: int
    laws = Laws(contractive=True, covers=True, total=True, stays_on_device=True, fixed_rounds=True)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        """Number of int32 words that the upper bits of `numel` elements take; see `Codec.payload`."""
        return upper_words(numel, self.bits), torch.int32

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return ctx.kernels[pack_upper](x, self.bits, left=False)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Encode x and leave the dropped bits in it. Nothing is rounded."""
        return ctx.kernels[pack_upper](x, self.bits, left=True)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        ctx.kernels[add_upper](payload, self.bits, out, weight)


def upper_bits(bits: int = 18) -> Truncate:
    """Drop `bits` bits of float32's mantissa.

    Raises `ValueError` unless `bits` is 1 … 22.

    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> x, out = torch.tensor([1.0, 3.14159]), torch.zeros(2)
    >>> upper_bits(18).add_decoded(upper_bits(18).encode(x, ctx), out, 1.0, ctx)
    >>> out
    tensor([1.0000, 3.1250])
    """
    if not 1 <= bits <= 22:
        raise ValueError(f"bits={bits} is outside 1 … 22; of 23 bits of mantissa GComp's baseline drops 18")
    return Truncate(bits)


@register
def truncate(bits: int = 18, feedback: bool = False) -> Composition:
    """Sign, exponent and 23 - bits bits of mantissa: 0.44 of the bytes at 18, and biased without feedback.

    Travels: the upper 32 - bits bits of every value.
    Paper: Li et al. 2024, "Near-lossless gradient compression for data-parallel distributed DNN training".
    Use when: as a baseline; int8 with error feedback is smaller and errs less.

    Args:
        bits: lower bits of each float32 that are cut off.
        feedback: keep what is cut off in a memory, and add it to the next gradient.
    """
    return rounded(upper_bits(bits), feedback)
