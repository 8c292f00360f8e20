"""Every element in a shorter floating-point type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.base import CodecLaws
from gradwire.moment import Moment


@dataclass(frozen=True)
class Cast:
    """Round to nearest in `dtype`. float16 overflows above 65504; bfloat16 has float32's range."""

    dtype: torch.dtype
    laws = CodecLaws(linear=True, contractive=True, covers=True, may_overflow=True)

    def payload(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[int, torch.dtype]:
        return numel, self.dtype

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        return x.to(self.dtype, copy=True)

    def take(self, x: Tensor, at: Moment) -> Tensor:
        payload = self.encode(x, at)
        self.add_decoded(payload, x, -1.0, at)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        out.add_(payload.to(out.dtype), alpha=weight)


def cast(dtype: torch.dtype) -> Cast:
    """Send float16 or bfloat16 instead of the gradient's own type.

    >>> import torch
    >>> from gradwire.moment import Moment
    >>> cast(torch.bfloat16).payload(10, torch.float32, Moment(step=0, unit=0, rank=0, world=1))
    (10, torch.bfloat16)
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"cannot cast to {dtype}; choose torch.float16 or torch.bfloat16")
    return Cast(dtype)
