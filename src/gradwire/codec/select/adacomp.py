"""Whatever is nearly as large as the largest of its bin.

AdaComp (Chen et al. 2018, "Adaptive residual gradient compression for data-parallel distributed training",
section 3): with G the residual and gradient together and dW the latest gradient alone, an element of a bin
is sent if |G + dW| >= max |G| over the bin. The number sent follows the gradient: many where none stands
out, few where one does.

Differences from the paper: only x = G is at hand here, not dW. Where all of x is the latest gradient (no
residual) the paper's rule is 2|x| >= max; `scale` = 2 takes this, its most generous case, for all. 1 takes
the maxima alone, its limit for a residual much larger than the gradient. Of normal elements in bins of
500, 13 % reach half of the largest, so with `scale` = 2 the bound is what counts until residuals have grown
uneven. Values travel as they are, where the paper sends signs and one mean magnitude. No more than a share
`at_most` travels; bins run through the whole unit (the paper takes 50 elements for convolutions and 500 for
other layers); zeros are never sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.select.room import largest_of
from gradwire.kernels import indices_near_maxima
from gradwire.moment import Moment


@dataclass(frozen=True)
class AdaComp:
    """All non-zero |x| >= max/scale of their bin; if they are more than the bound, the largest of them.

    What is left of a bin is at most 1 - 1/bin_elements of its squared norm; where the bound cuts, the share
    that is sent of this falls to bound/numel at worst.
    """

    bin_elements: int = 500
    at_most: float = 0.1
    scale: float = 2.0
    shared: bool = False
    contractive: bool = True
    fixed_size: bool = False

    def count(self, numel: int, at: Moment) -> int:
        """See `Selector.count`. The bound."""
        return count_kept(self.at_most, numel)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`."""
        near = indices_near_maxima(x, self.bin_elements, self.scale)
        return largest_of(x, near, self.count(x.numel(), at))


def ada_comp(bin_elements: int = 500, at_most: float = 0.1, scale: float = 2.0) -> AdaComp:
    """Keep what reaches 1/scale of its bin's largest magnitude, but no more than the share `at_most`.

    >>> import torch
    >>> x = torch.tensor([4.0, -2.0, 1.0, 0.0, 0.1, 0.2])
    >>> ada_comp(bin_elements=3, at_most=1.0).select(x, Moment(step=0, unit=0, rank=0, world=1))
    tensor([0, 1, 4, 5])
    """
    if bin_elements < 1:
        raise ValueError(f"bin_elements={bin_elements} is not 1 or more; the paper takes 50 or 500")
    if not 1.0 <= scale < math.inf:
        raise ValueError(f"scale={scale} is outside [1, ∞); with less than 1 not even the largest is sent")
    return AdaComp(bin_elements, check_ratio(at_most), scale)
