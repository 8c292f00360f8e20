"""QSGD and TernGrad: every element is rounded at random to one of two neighbouring levels, right in the mean.
`qsgd` has levels of a bucket's norm, `terngrad` has −s, 0 and +s with s a parameter's largest magnitude.

QSGD: Alistarh, Grubic, Li, Tomioka and Vojnovic 2017, "QSGD: Communication-efficient SGD via gradient
quantization and encoding", section 3.1: of a bucket v of d elements, element i becomes ‖v‖ · sgn(v_i) · ℓ/s
or ‖v‖ · sgn(v_i) · (ℓ + 1)/s with ℓ = ⌊s·|v_i|/‖v‖⌋, the latter with probability s·|v_i|/‖v‖ − ℓ.

TernGrad: Wen, Xu, Yan, Wu, Wang, Chen and Li 2017, "TernGrad: ternary gradients to reduce communication in
distributed deep learning", section 3.1: s = max|x| of a layer, and x_i becomes s · sgn(x_i) with
probability |x_i|/s. Section 3.3 clips each layer's gradient at c = 2.5 standard deviations before that, so
that s is not an outlier's.

Differences from the paper, QSGD:

- Codes have a fixed 2, 4 or 8 bits, not Elias' lengths, because a collective needs sizes that are known.
- Sign and level are one number in two's complement, so there are s = 2^(bits − 1) − 1 levels; ‖v‖/s
  travels, not ‖v‖.
- Buckets end where a parameter ends. A norm beyond the type's largest number is cut to that, which is still
  no smaller than any element.
- With `feedback`, which needs a contraction, what is rounded off is remembered.

Differences from the paper, TernGrad:

- Ranks do not share the largest s of all (section 3.2, "scaler sharing"). The paper needs it so that sums
  of W ternary numbers have 2W + 1 levels and travel back from a server in few bits; here every rank decodes
  every payload, and an s of each rank's own errs less.
- Clipping is off by default, because it is not right in the mean; the deviation is taken about 0, which is
  near a gradient's mean.
- Vectors and tiny tensors travel densely; the paper has a scale for each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from gradwire.codec.scales import ScaledPayload
from gradwire.exchange.compose import forget, remember
from gradwire.exchange.payloads import gather
from gradwire.kernels.layouts import Grid, Norm, step_type
from gradwire.kernels.stochastic import add_quantized, quantize
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class Levels:
    """The steps of all buckets in `dtype`, then all codes.

    >>> Levels(Grid((1000, 3), bucket=512, bits=4), torch.float32).bytes
    516
    """

    grid: Grid
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self._layout.bytes

    @cached_property
    def _layout(self) -> ScaledPayload:
        return ScaledPayload(self.grid.buckets, self.grid.code_bytes, self.dtype)

    def write(self, x: Tensor, ctx: ExchangeContext, *, subtract: bool) -> Tensor:
        """Encode x (numel,) into a new payload (bytes,) uint8; with `subtract`, x keeps its rounding
        errors.
        """
        payload = self._layout.empty(x.device)
        # One draw for all of a unit: elements differ by their index in it.
        key = int(torch.randint(2**63 - 1, (), generator=ctx.private(), device="cpu"))
        ctx.kernels[quantize](x, self.grid, key, *self._layout.split(payload), subtract=subtract)
        return payload

    def add(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        """out (numel,) += weight · decoded payload."""
        if out.numel():  # an empty row of a gathered buffer has an odd storage offset, which no view allows
            ctx.kernels[add_quantized](*self._layout.split(payload), self.grid, out, weight)


@dataclass(frozen=True)
class Qsgd:
    """Buckets of at most `bucket` elements of one parameter, codes of `bits` bits.

    In the mean over draws ‖Q(v) − v‖² ≤ min(d/(4s²), √d/s) ‖v‖² (lemma 3.1, where a variance of p(1 − p)
    per element is bounded by 1, not 1/4), and in every draw ‖Q(v) − v‖² < d/s² · ‖v‖², as no element moves
    by more than a step: with the Euclidean norm, and all the more with the largest magnitude, which is no
    larger. Beside that, the rounding of numbers of v's type.
    """

    bits: int
    bucket: int
    norm: Norm

    @cached_property
    def laws(self) -> Laws:
        """Contractive where d/s² < 1, in every draw.

        With 8 bits that is up to buckets of 16 128 elements, with 4 bits up to 48.
        """
        return Laws(
            contractive=self.bucket < self._grid((1,)).levels ** 2,
            unbiased=True,
            total=True,
            stays_on_device=True,
            fixed_rounds=True,
        )

    def _grid(self, sizes: tuple[int, ...]) -> Grid:
        return Grid(sizes, self.bucket, self.bits, self.norm)

    def _levels(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> Levels:
        return ctx.once(self._layout, numel, dtype)

    def _layout(self, ctx: ExchangeContext, numel: int, dtype: torch.dtype) -> Levels:
        return Levels(self._grid(ctx.sizes(numel)), step_type(dtype))

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return self._levels(numel, dtype, ctx).bytes, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._levels(x.numel(), x.dtype, ctx).write(x, ctx, subtract=False)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._levels(x.numel(), x.dtype, ctx).write(x, ctx, subtract=True)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        self._levels(out.numel(), out.dtype, ctx).add(payload, out, weight, ctx)


def qsgd_codec(bits: int = 8, bucket: int = 512, norm: Norm = "l2") -> Qsgd:
    """Stochastic levels of 2, 4 or 8 bits, scaled by the Euclidean norm of a bucket or by its maximum.

    A zero bucket stays zero; NaN or Inf make their bucket NaN. `norm="max"` errs less and is not sparse.

    >>> from gradwire.unit.context import ExchangeContext
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> qsgd_codec(bits=4).payload(1024, torch.float32, ctx)
    (520, torch.uint8)
    >>> qsgd_codec(bits=8).laws.contractive, qsgd_codec(bits=4).laws.contractive
    (True, False)
    >>> codec = qsgd_codec(norm="max")
    >>> out = torch.zeros(2)
    >>> codec.add_decoded(codec.encode(torch.tensor([127.0, -64.0]), ctx), out, 1.0, ctx)
    >>> out
    tensor([127., -64.])
    """
    Grid((), bucket, bits, norm)  # says what is wrong with them
    return Qsgd(bits, bucket, norm)


@dataclass(frozen=True)
class TernGrad:
    """Two bits per element and one scale per parameter, or per what a unit holds of it.

    In the mean over draws ‖T(x) − x‖² = s‖x‖₁ − ‖x‖² ≤ (√d − 1)/2 · ‖x‖² for d elements, with equality for
    one of 1 and all others 1/(1 + √d): not a contraction from d = 9 on. With `clip`, what exceeds it is cut.
    """

    clip: float | None = None

    @cached_property
    def laws(self) -> Laws:
        """Unbiased unless it clips."""
        return Laws(unbiased=self.clip is None, total=True, stays_on_device=True, fixed_rounds=True)

    def _levels(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> Levels:
        return ctx.once(self._layout, numel, dtype)

    def _layout(self, ctx: ExchangeContext, numel: int, dtype: torch.dtype) -> Levels:
        clip = math.inf if self.clip is None else self.clip
        grid = Grid(ctx.sizes(numel), bucket=None, bits=2, norm="max", clip=clip)
        return Levels(grid, step_type(dtype))

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return self._levels(numel, dtype, ctx).bytes, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._levels(x.numel(), x.dtype, ctx).write(x, ctx, subtract=False)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._levels(x.numel(), x.dtype, ctx).write(x, ctx, subtract=True)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        self._levels(out.numel(), out.dtype, ctx).add(payload, out, weight, ctx)


LEAST_CLIP = 1e-6
"""Of far fewer standard deviations, a scale in float32 may be zero, by which the kernel divides."""


def tern_grad(clip: float | None = None) -> TernGrad:
    """Ternary numbers with a scale per parameter; `clip` is in standard deviations, in the paper 2.5.

    Raises `ValueError` unless `clip` is `None` or at least `LEAST_CLIP`.

    >>> from gradwire.unit.context import ExchangeContext
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> codec, out = tern_grad(), torch.zeros(3)
    >>> codec.add_decoded(codec.encode(torch.tensor([5.0, 0.0, -5.0]), ctx), out, 1.0, ctx)
    >>> out
    tensor([ 5.,  0., -5.])
    >>> codec.payload(1000, torch.float32, ctx)
    (256, torch.uint8)
    """
    if clip is not None and not clip >= LEAST_CLIP:
        raise ValueError(
            f"clip={clip} is below {LEAST_CLIP} standard deviations; 2.5 is usual, None clips nothing"
        )
    return TernGrad(clip)


@register
def qsgd(
    bits: int = 8, bucket: int = 512, norm: Literal["l2", "max"] = "l2", feedback: bool = False
) -> Composition:
    """Levels of 2, 4 or 8 bits, right in the mean, all-gathered: traffic grows with the world.

    Travels: a code per element and a scale per bucket, of every rank.
    Paper: Alistarh et al. 2017, "QSGD: Communication-efficient SGD via gradient quantization and encoding".
    Use when: there are two to four ranks, a quarter of the traffic is enough, and memory is short.

    Args:
        bits: bits of a code: 2, 4 or 8.
        bucket: elements per scale.
        norm: scale of a bucket: its Euclidean norm ("l2") or its largest magnitude ("max").
        feedback: keep rounding errors for the next step.
    """
    exchange = gather(qsgd_codec(bits, bucket, norm))
    return Composition(remember(exchange) if feedback else forget(exchange))


@register
def terngrad(clip: float | None = None) -> Composition:
    """Two bits per element without a memory, all-gathered: traffic grows with the world.

    Travels: −1, 0 or 1 per element and a scale per parameter, of every rank.
    Paper: Wen et al. 2017, "TernGrad: ternary gradients to reduce communication in deep learning".
    Use when: there are many noisy steps, and no memory for error feedback; clip=2.5 is the paper's setting.

    Args:
        clip: gradients of a parameter are clipped at that many of its standard deviations first; `None` clips
            nothing.
    """
    return Composition(forget(gather(tern_grad(clip))))
