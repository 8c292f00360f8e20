"""Everything above a fixed magnitude is sent. The number of elements follows the gradient, and may be none.

Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing", section 4.

Differences from the paper:

- Values travel as they are. Strom sends only their signs, for ± threshold each, and leaves the rest to the
  residual.
- No rank sends more than a share `at_most` in one step.
- All ranks send as many as the one with the most. The others fill up with further elements, in a row from a
  random place, which may be far below the threshold (`gradwire.exchange.uneven_gather`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.exchange.compose import remember
from gradwire.exchange.uneven_gather import agreed
from gradwire.kernels.threshold import indices_reaching
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import Values, dtype_of
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class FixedThreshold:
    """Select all elements with |x| >= threshold, which may be none; at most the share `at_most` of elements,
    the largest ones.

    A contraction but for a floor: with the bound k = at_most·numel, ‖left‖² <= (1 - k/numel)‖x‖² +
    numel·threshold². Nothing is sent of an x that is below the threshold everywhere. Error feedback adds up
    what is not sent, until it reaches the threshold.
    """

    threshold: float
    at_most: float = 0.1
    laws = Laws(contractive=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.at_most, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        bound = self.count(x.numel(), ctx)
        found = ctx.kernels[indices_reaching](x, self.threshold, bound)
        return found if found.numel() <= bound else ctx.kernels[topk_indices](x, bound)


def fixed_threshold(threshold: float, at_most: float = 0.1) -> FixedThreshold:
    """Keep what reaches `threshold`, but no more than the share `at_most`.

    Raises `ValueError` unless `threshold` is positive and finite, and `at_most` in (0, 1].

    >>> import torch
    >>> x = torch.tensor([0.5, -2.0, 1.0, 0.1])
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> fixed_threshold(1.0, at_most=0.5).select(x, ctx), fixed_threshold(0.5, at_most=0.25).select(x, ctx)
    (tensor([1, 2]), tensor([1]))
    """
    if not 0.0 < threshold < math.inf:
        raise ValueError(f"threshold={threshold} is outside (0, ∞); magnitudes are compared with it")
    return FixedThreshold(threshold, check_ratio(at_most))


@register
def threshold(threshold: float = 0.001, at_most: float = 0.1, values: Values = "full") -> Composition:
    """All elements above a fixed threshold with error feedback, all-gathered in the largest size.

    Travels: counts; then places and values, as many as the rank with the most has.
    Paper: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing".
    Use when: comparing with it: the right threshold differs between models, layers and epochs.

    Args:
        threshold: magnitude from which an element is sent.
        at_most: largest share of the elements that a rank selects.
        values: "full" sends values in the gradient's type; "fp16" and "bf16" shorten them.
    """
    return Composition(remember(agreed(fixed_threshold(threshold, at_most), dtype_of(values))))
