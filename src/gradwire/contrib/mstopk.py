"""MSTopk: two thresholds that bracket the k-th largest are found by bisection, without sorting. What reaches
the upper one is sent, and so is a run of neighbours, from a random start, among those between the two.

Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters", section
III, algorithm 1: `rounds` thresholds between the mean and the largest of |x|, each followed by a count.

Differences from the paper:

- The counts are those over everything, but are made among a few candidates that reach a lower threshold
  guessed from a sample. Every threshold of the bisection that matters lies above it.
- The run goes on from the first after the last, so that all are equally likely: γ = 1 - k/numel in the
  mean.
- Where no threshold has k or fewer elements above it, none is chosen outright; the listing would choose
  all.
- Where the bracket is so wide that the run would be arbitrary (lower below half of the upper, and less than
  half of k above), and where there are NaN or Inf, the exact top k is chosen.
- Per unit, and only with `fused` over the whole gradient; one all-gather, no hierarchy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.select.threshold import fill_up, random_start, threshold_of_sample
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.kernels.threshold import indices_reaching, moments_reaching, rounded
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded
from gradwire.recipes.units import fused_cutter
from gradwire.unit.context import ExchangeContext

_SAMPLE = 16384
"""Elements drawn to guess where the candidates begin."""


@dataclass(frozen=True)
class Bracket:
    """Two thresholds: at most k magnitudes reach `upper`, more than k reach `lower`; 0 if no round
    found one.
    """

    lower: float
    upper: float
    above: int
    """Number of elements that reach `upper`."""
    largest: float
    """Largest of all magnitudes."""


@dataclass(frozen=True)
class MSTopK:
    """Selector of k elements with nearly the largest magnitudes, found by bisection of a threshold.

    Unselected elements have at most 1 - k/(4·numel) of the squared norm. For this, one of two holds: k/2 of
    the selected elements are the largest of all, or every selected magnitude is at least half of any other.

    Args:
        ratio: k as a share of the elements.
        rounds: rounds of the bisection.
    """

    ratio: float
    rounds: int = 25
    laws = Laws(contractive=True, fixed_size=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        k = self.count(x.numel(), ctx)
        if k == x.numel():
            return torch.arange(k, device=x.device)
        mean = ctx.kernels[moments_reaching](x, 0.0).total / x.numel()
        if not math.isfinite(mean):
            return ctx.kernels[topk_indices](x, k)
        indices, floor = _candidates(x, k, rounded(mean, x.dtype), ctx)
        magnitudes = x[indices].abs()
        bracket = bisect(magnitudes, k, mean, self.rounds)
        if 2 * bracket.above < k and 2 * bracket.lower < min(bracket.upper, bracket.largest):
            return ctx.kernels[topk_indices](x, k)
        if 0.0 < bracket.lower < floor:
            indices = ctx.kernels[indices_reaching](x, bracket.lower, x.numel())
            magnitudes = x[indices].abs()
        return _within(bracket, indices, magnitudes, k, x.numel(), ctx)


def _candidates(x: Tensor, k: int, mean: float, ctx: ExchangeContext) -> tuple[Tensor, float]:
    """Find the elements among which the bisection looks for its threshold.

    A random sample of x proposes a floor that more than k elements should reach. If k or fewer reach it, or
    far too many, the floor is the mean, the least threshold of the bisection.

    Args:
        x: (numel,).
        k: number of elements to select.
        mean: mean of the magnitudes of x.

    Returns (indices of all elements whose magnitude reaches the floor, ascending; the floor).
    """
    size = min(_SAMPLE, x.numel())
    expected = k / x.numel() * size
    # Four standard deviations below the k-th largest: fails about once in 10^4 calls.
    rank = math.ceil(expected + 4 * expected**0.5) + 4
    if rank < size:
        floor = max(mean, threshold_of_sample(x, size, rank, ctx))
        capacity = 2 * k + 16 * x.numel() // size + 64
        found = ctx.kernels[indices_reaching](x, floor, capacity)
        if k < found.numel() <= capacity:
            return found, floor
    return ctx.kernels[indices_reaching](x, mean, x.numel()), mean


def bisect(magnitudes: Tensor, k: int, mean: float, rounds: int) -> Bracket:
    """The bracket of k after `rounds` rounds between the mean of all elements and the largest.

    `magnitudes` may leave out those below some floor, if the floor is at most the mean or more than k
    reach it: a threshold below it then finds more than k all the same.

    >>> bisect(torch.tensor([1.0, 2.0, 3.0, 9.0]), k=2, mean=3.75, rounds=25)
    Bracket(lower=0.0, upper=6.375, above=1, largest=9.0)
    >>> bisect(torch.tensor([4.0, 5.0, 8.0, 9.0]), k=1, mean=2.0, rounds=3)
    Bracket(lower=7.25, upper=8.125, above=1, largest=9.0)
    """
    largest = float(magnitudes.max()) if magnitudes.numel() else mean
    bracket, low, high = Bracket(0.0, math.inf, 0, largest), 0.0, 1.0
    for _ in range(rounds):
        share = (low + high) / 2
        threshold = rounded(mean + share * (largest - mean), magnitudes.dtype)
        count = int((magnitudes >= threshold).sum())
        if count > k:
            low, bracket = share, replace(bracket, lower=threshold)
        else:
            high = share
            if count > bracket.above:
                bracket = replace(bracket, upper=threshold, above=count)
    return bracket


def _within(
    bracket: Bracket, indices: Tensor, magnitudes: Tensor, k: int, numel: int, ctx: ExchangeContext
) -> Tensor:
    """Select k of `numel` elements: all above the bracket, and a run of those within it from a random start.

    `indices` and `magnitudes` are those of the elements that may lie within the bracket or above it. Returns
    indices (k,).
    """
    above = magnitudes >= bracket.upper
    need = k - bracket.above
    if need == 0:
        return indices[above]
    if bracket.lower == 0.0:  # everything lies within it
        return fill_up(indices[above], k, numel, ctx)
    within = ((magnitudes >= bracket.lower) & ~above).nonzero().view(-1)
    above[within.roll(-random_start(within.numel(), ctx))[:need]] = True
    return indices[above]


MOST_ROUNDS = 1000
"""Far more than halve a share in float64, which has 53 bits. Each looks at all candidates."""


def ms_top_k(ratio: float, rounds: int = 25) -> MSTopK:
    """Keep about the share `ratio` with the largest magnitudes, after `rounds` rounds of bisection.

    Raises `ValueError` for a ratio outside (0, 1], and for less than one round or more than `MOST_ROUNDS`.

    >>> x = torch.tensor([0.1, -3.0, 0.2, 2.0, 0.3, 0.1, 0.2, 0.1])
    >>> ms_top_k(0.25).select(x, ExchangeContext(step=0, unit=0, rank=0, world=1))
    tensor([1, 3])
    """
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ValueError(f"rounds={rounds} is outside 1 … {MOST_ROUNDS}; the paper takes 25")
    return MSTopK(check_ratio(ratio), rounds)


@register
def mstopk(
    ratio: float = 0.01, rounds: int = 25, values: CodedValues = "full", fused: bool = False
) -> Composition:
    """Approximate top-k by bisection with error feedback, all-gathered.

    Travels: places and values of every rank's own choice.
    Paper: Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters".
    Use when: comparing with it: on CPUs the exact choice is no slower.

    Args:
        rounds: rounds of the bisection, 1 … 1000.
        ratio, values, fused: as in `topk`.
    """
    exchange = remember(gather(coded(ms_top_k(ratio, rounds), values)))
    return Composition(exchange, fused_cutter(fused))
