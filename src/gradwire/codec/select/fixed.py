"""Whatever reaches a threshold that was given.

Strom 2015 ("Scalable distributed DNN training using commodity GPU cloud computing", section 4).

Differences from the paper: values travel as they are, where Strom sends only their signs, for ± threshold
each, and leaves the rest to the residual; and no more than a share `at_most` travels in one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import SelectorLaws, check_ratio, count_kept
from gradwire.kernels import indices_reaching, topk_indices
from gradwire.moment import Moment


@dataclass(frozen=True)
class FixedThreshold:
    """All |x| >= threshold, which may be none; if they are more than the bound, the largest.

    Not a contraction for small x, of which nothing is sent, but what is left is below the threshold in
    every element: ‖left‖² <= (1 - bound/numel)‖x‖² + numel·threshold².
    """

    threshold: float
    at_most: float = 0.1
    laws = SelectorLaws(contractive=True)

    def count(self, numel: int, at: Moment) -> int:
        """See `Selector.count`. The bound."""
        return count_kept(self.at_most, numel)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`."""
        bound = self.count(x.numel(), at)
        found = indices_reaching(x, self.threshold, bound)
        return found if found.numel() <= bound else topk_indices(x, bound)


def fixed_threshold(threshold: float, at_most: float = 0.1) -> FixedThreshold:
    """Keep what reaches `threshold`, but no more than the share `at_most`.

    >>> import torch
    >>> x = torch.tensor([0.5, -2.0, 1.0, 0.1])
    >>> at = Moment(step=0, unit=0, rank=0, world=1)
    >>> fixed_threshold(1.0, at_most=0.5).select(x, at), fixed_threshold(0.5, at_most=0.25).select(x, at)
    (tensor([1, 2]), tensor([1]))
    """
    if not 0.0 < threshold < math.inf:
        raise ValueError(f"threshold={threshold} is outside (0, ∞); magnitudes are compared with it")
    return FixedThreshold(threshold, check_ratio(at_most))
