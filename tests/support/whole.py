"""What tests send whole: all elements, the tensor itself, parameters in one part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext, Part


@dataclass(frozen=True)
class Everything:
    """All elements."""

    laws = Laws(shared=True, contractive=True, fixed_size=True, stays_on_device=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return numel

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return torch.arange(x.numel(), device=x.device)


def everything() -> Everything:
    """Keep all elements."""
    return Everything()


@dataclass(frozen=True)
class Raw:
    """The tensor itself, as a codec: the one that is lossless without a doubt."""

    laws = Laws(
        linear=True, lossless=True, contractive=True, covers=True, unbiased=True, stays_on_device=True
    )

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return numel, dtype

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return x.clone()

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        payload = x.clone()
        x.zero_()
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        out.add_(payload, alpha=weight)


def parts_of(*sizes: int) -> tuple[Part, ...]:
    """Whole vectors of these sizes."""
    return tuple(Part(f"p{number}", (size,), 0, size) for number, size in enumerate(sizes))
