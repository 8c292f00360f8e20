"""AdaComp: an element is sent if it comes near the largest of its bin. The number sent follows the gradient:
many where none stands out, few where one does.

Chen, Choi, Brand, Agrawal, Zhang and Gopalakrishnan 2018, "AdaComp: adaptive residual gradient compression
for data-parallel distributed training", section 3: with G the residual and gradient together and dW the
latest gradient alone, an element of a bin is sent if |G + dW| >= max |G| over the bin. Here G is x and the
residual is `ExchangeContext.unsent`, so dW = x - unsent and the rule is |2x - unsent| >= max |x|. Early on,
where residuals are small, that is half of the largest, and `at_most` is what counts; as they grow, less and
less reaches it.

Differences from the paper:

- The largest of a bin always travels, so that every bin shrinks. The rule alone would keep it back while
  the latest gradient points the other way.
- Values travel as they are; the paper sends signs and one mean magnitude.
- No rank sends more than a share `at_most`, and no zero is chosen.
- All ranks send as many as the one with the most. The others fill up with further elements, in a row from a
  random place, which the rule has not chosen (`gradwire.exchange.uneven_gather`).
- Bins run through the whole unit; the paper takes 50 elements for convolutions and 500 for other layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.select.threshold import largest_of
from gradwire.exchange.compose import remember
from gradwire.exchange.uneven_gather import agreed
from gradwire.kernels.chunks import indices_near_maxima
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import Values, dtype_of
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class AdaComp:
    """Elements that would reach their bin's largest after another such gradient: the largest, up to a bound.

    The rest of a bin has at most 1 - 1/bin_elements of its squared norm. If the bound leaves elements out,
    the share of the squared norm that is sent falls to bound/numel at worst.
    """

    bin_elements: int = 500
    at_most: float = 0.1
    laws = Laws(contractive=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.at_most, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        ahead = 2 * x if ctx.unsent is None else 2 * x - ctx.unsent
        near = ctx.kernels[indices_near_maxima](x, ahead, self.bin_elements)
        return largest_of(x, near, self.count(x.numel(), ctx), ctx.kernels)


def ada_comp(bin_elements: int = 500, at_most: float = 0.1) -> AdaComp:
    """Select elements that would reach their bin's maximum with one more such gradient, at most the share
    `at_most`.

    Raises `ValueError` for `bin_elements` below 1 or a share outside (0, 1].

    >>> import torch
    >>> x, ctx = torch.tensor([4.0, -2.0, 1.0, 0.0]), ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> ada_comp(bin_elements=4, at_most=1.0).select(x, ctx)
    tensor([0, 1])
    """
    if bin_elements < 1:
        raise ValueError(f"bin_elements={bin_elements} is not 1 or more; the paper takes 50 or 500")
    return AdaComp(bin_elements, check_ratio(at_most))


@register
def adacomp(bin_elements: int = 500, at_most: float = 0.1, values: Values = "full") -> Composition:
    """Elements near their bin's largest with error feedback, all-gathered in the largest size.

    Travels: counts; then places and values, as many as the rank with the most has.
    Paper: Chen et al. 2018, "AdaComp: adaptive residual gradient compression".
    Use when: the right ratio is unknown and may change during training.

    Args:
        bin_elements: elements of a bin.
        at_most: largest share of the elements that a rank selects.
        values: "full" sends values in the gradient's type; "fp16" and "bf16" shorten them.
    """
    return Composition(remember(agreed(ada_comp(bin_elements, at_most), dtype_of(values))))
