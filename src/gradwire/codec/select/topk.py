"""Exact top-k of a whole unit by magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class TopK:
    """Selector of the largest magnitudes, exactly; ties go to the lowest index."""

    ratio: float
    laws = Laws(contractive=True, fixed_size=True, stays_on_device=True, fixed_rounds=True, repeats=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return ctx.kernels[topk_indices](x, self.count(x.numel(), ctx))


def top_k(ratio: float) -> TopK:
    """Keep the share `ratio` with the largest magnitudes."""
    return TopK(check_ratio(ratio))
