"""Values in a shorter floating-point type: the codec that casts, and how values get into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class Cast:
    """Codec that rounds to `dtype`, to nearest. float16 overflows above 65504; bfloat16 has float32's
    range.
    """

    dtype: torch.dtype
    laws = Laws(
        linear=True,
        contractive=True,
        covers=True,
        may_overflow=True,
        total=True,
        stays_on_device=True,
        fixed_rounds=True,
    )

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return numel, self.dtype

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return x.to(self.dtype, copy=True)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        payload = self.encode(x, ctx)
        self.add_decoded(payload, x, -1.0, ctx)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        out.add_(payload.to(out.dtype), alpha=weight)


def cast(dtype: torch.dtype) -> Cast:
    """Send float16 or bfloat16 instead of the gradient's own type.

    Raises `ValueError` for other types.

    >>> import torch
    >>> from gradwire.unit.context import ExchangeContext
    >>> cast(torch.bfloat16).payload(10, torch.float32, ExchangeContext(step=0, unit=0, rank=0, world=1))
    (10, torch.bfloat16)
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"cannot cast to {dtype}; choose torch.float16 or torch.bfloat16")
    return Cast(dtype)


def wire_type(wanted: torch.dtype | None, own: torch.dtype, ctx: ExchangeContext) -> torch.dtype:
    """Type in which values of type `own` travel: `wanted`, or else the parameters' type, if it is shorter.

    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1, narrow=torch.bfloat16)
    >>> wire_type(torch.float16, torch.float32, ctx), wire_type(None, torch.float32, ctx)
    (torch.float16, torch.bfloat16)
    """
    short = wanted or ctx.narrow
    return own if short is None or short.itemsize >= own.itemsize else short


def cast_for_sum(values: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    """Round `values` to a shorter type, clamped so that a sum over `world` ranks cannot overflow.

    The limit is the largest power of two up to 1/W of the type's largest number. Multiples of it are exact
    (up to 2048 ranks in float16, 256 in bfloat16), and rounding to nearest keeps a partial sum of k ranks at
    or below k times the limit.
    """
    limit = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / world))
    return values.clamp(-limit, limit).to(dtype)


def check_wire_type(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return `dtype`; raises `ValueError` unless it is float16, bfloat16 or `None`."""
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"values cannot travel as {dtype}; choose torch.float16 or torch.bfloat16")
    return dtype
