"""SIDCo: a threshold from a distribution that is fitted to the magnitudes, in stages. No sorting: the fit is
of closed form, and so is the threshold that a share δ of the magnitudes exceeds.

Abdelmoniem, Elzanaty, Alouini and Canini 2021, "An efficient statistical-based gradient compression
technique for distributed training systems", sections 2.2 to 2.4: magnitudes are taken to be exponential,
gamma or generalised Pareto. Tails are heavier or lighter than the fit, so what exceeds the threshold is
fitted anew, stage by stage, with the excess over it (peaks over threshold): the first stage keeps 1/4, the
others share the rest of the way evenly.

Differences from the paper:

- The number of stages is an option; the paper adapts it to the numbers seen in earlier steps.
- Exactly k are kept (`threshold.exactly`).
- The fit is to what is not zero, of which the k are then a larger share.
- Per unit, and only with `fused` over the whole gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.select.threshold import exactly
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.kernels.dispatch import LOOKING, Kernels
from gradwire.kernels.threshold import moments_reaching
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded
from gradwire.recipes.units import fused_cutter
from gradwire.unit.context import ExchangeContext

Fit = Literal["exponential", "gamma", "pareto"]
"""SIDCo-E, SIDCo-GP (gamma first, then generalised Pareto) and SIDCo-P of the paper."""

FIRST_RATIO = 0.25
_BLOCK = 2**20


@dataclass(frozen=True)
class Sidco:
    """About the largest magnitudes; the ⌈k/2⌉ largest are among them."""

    ratio: float
    stages: int = 3
    fit: Fit = "exponential"
    laws = Laws(contractive=True, fixed_size=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        k = self.count(x.numel(), ctx)
        threshold = self.threshold(x, ctx.kernels)
        return ctx.kernels[topk_indices](x, k) if math.isnan(threshold) else exactly(x, threshold, k, ctx)

    def threshold(self, x: Tensor, kernels: Kernels = LOOKING) -> float:
        """The threshold after the last stage; NaN where there is nothing to fit."""
        threshold, floor = 0.0, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
        share = count_kept(self.ratio, x.numel()) / max(kernels[moments_reaching](x, floor).number, 1)
        if share >= 1.0:
            return math.nan
        for stage, ratio in enumerate(stage_ratios(share, self.stages)):
            number, total, squares = kernels[moments_reaching](x, max(threshold, floor))
            if number == 0 or not math.isfinite(squares):
                return math.nan  # nothing to fit: an earlier stage went too far, or there are NaN or Inf
            mean = max(total / number - threshold, 0.0)
            if self.fit == "gamma" and stage == 0:
                threshold = gamma_threshold(mean, mean_logarithm(x), ratio)
            elif self.fit == "exponential":
                threshold += mean * -math.log(ratio)
            else:
                # Σ(|x| - t)² from the sums of |x|² and |x|.
                square = squares / number - 2 * threshold * total / number + threshold**2
                threshold += pareto_threshold(mean, square - mean**2, ratio)
        return threshold


def stage_ratios(ratio: float, stages: int) -> tuple[float, ...]:
    """Share that each stage keeps of the previous one's elements; their product is `ratio`.

    >>> stage_ratios(0.01, 3), stage_ratios(0.01, 1), stage_ratios(0.5, 3)
    ((0.25, 0.2, 0.2), (0.01,), (0.5,))
    """
    if ratio >= FIRST_RATIO or stages == 1:
        return (ratio,)
    return (FIRST_RATIO, *[(ratio / FIRST_RATIO) ** (1 / (stages - 1))] * (stages - 1))


def gamma_threshold(mean: float, mean_log: float, ratio: float) -> float:
    """The threshold that a share `ratio` of gamma magnitudes exceeds, for shapes near 1 (corollary 1.2).

    `mean` and `mean_log` are the means of the magnitudes and of their natural logarithms. The shape is the
    closed form of Minka 2002 that the paper takes.

    >>> round(gamma_threshold(1.0, -0.5772, 0.1), 2)  # exponential: ln 10, its shape estimated as 0.98
    2.32
    """
    s = math.log(mean) - mean_log if mean > 0.0 else 0.0
    if s <= 1e-12:  # all magnitudes are equal, but for rounding
        return mean
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return max(-mean / shape * (math.log(ratio) + math.lgamma(shape)), 0.0)


def pareto_threshold(mean: float, variance: float, ratio: float) -> float:
    """The threshold that a share `ratio` of Pareto magnitudes exceeds, by matching the magnitudes' `mean` and
    `variance` (corollary 1.3).

    >>> round(pareto_threshold(1.0, 1.0, 0.1), 4)  # of the exponential, ln 10
    2.3026
    """
    if variance <= 0.0 or mean == 0.0:
        return mean
    squared = mean**2 / variance
    shape, scale = 0.5 * (1 - squared), 0.5 * mean * (squared + 1)
    exponent = -shape * math.log(ratio)
    return scale * -math.log(ratio) if shape == 0.0 else scale / shape * math.expm1(exponent)


def mean_logarithm(x: Tensor) -> float:
    """The mean of ln|x| over all x (numel,) that are not zero; 0 if there is none.

    >>> round(mean_logarithm(torch.tensor([1.0, 0.0, -math.e])), 6)
    0.5
    """
    total, number = 0.0, 0
    for block in torch.split(x, _BLOCK):  # so that no second tensor of that size is needed
        magnitudes = block[block != 0].abs()
        total += float(magnitudes.log().sum(dtype=torch.float64))
        number += magnitudes.numel()
    return total / max(number, 1)


MOST_STAGES = 1000
"""Far more than a fit needs. Each looks at all elements."""


def sidco_top_k(ratio: float, stages: int = 3, fit: Fit = "exponential") -> Sidco:
    """Keep about the share `ratio` with the largest magnitudes, judged by a fitted distribution.

    `stages` and `fit` are as in `sidco`. Raises `ValueError` for a ratio outside (0, 1], less than one stage
    or more than `MOST_STAGES`, or an unknown distribution.

    >>> x = torch.linspace(0.0, 1.0, 1001)[:-1].log1p()
    >>> len(sidco_top_k(0.01).select(x, ExchangeContext(step=0, unit=0, rank=0, world=1)))
    10
    """
    if not 1 <= stages <= MOST_STAGES:
        raise ValueError(f"stages={stages} is outside 1 … {MOST_STAGES}; two or three reach 0.1 %")
    if fit not in get_args(Fit):
        raise ValueError(f"fit={fit!r} is none of {', '.join(get_args(Fit))}")
    return Sidco(check_ratio(ratio), stages, fit)


@register
def sidco(
    ratio: float = 0.01,
    stages: int = 3,
    fit: Fit = "exponential",
    values: CodedValues = "full",
    fused: bool = False,
) -> Composition:
    """Approximate top-k by a statistical threshold with error feedback, all-gathered.

    Travels: places and values of every rank's own choice.
    Paper: Abdelmoniem et al. 2021, "An efficient statistical-based gradient compression technique".
    Use when: comparing with it, or where a sort is slow and gradients follow the fitted law.

    Args:
        stages: fits of the distribution, each to the magnitudes above the threshold before; 1 … 1000.
        fit: distribution of the magnitudes: "exponential", "gamma" or "pareto".
        ratio, values, fused: as in `topk`.
    """
    exchange = remember(gather(coded(sidco_top_k(ratio, stages, fit), values)))
    return Composition(exchange, fused_cutter(fused))
