"""Threshold reuse: what the last step left says where to cut in this one.

Gradients change slowly, so a threshold serves for several steps (Li and Hoefler 2022, "Near-optimal sparse
allreduce for distributed deep learning", section 3.1.3).

Differences from the paper: the threshold is not kept for a fixed number of steps, it is read off the memory:
after a choice of the largest, the largest that is left is the threshold. So nothing has to be saved beside
the memory, and it follows the gradient by itself: it rises when too many reach it, because the smallest of
them stay, and falls when too few do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select.base import SelectorLaws, check_ratio, count_kept
from gradwire.codec.select.room import exactly
from gradwire.kernels import topk_indices
from gradwire.moment import Moment


@dataclass(frozen=True)
class ReusedThreshold:
    """What reaches the largest magnitude that was left unsent; the exact top-k when nothing was."""

    ratio: float
    laws = SelectorLaws(contractive=True, fixed_size=True)

    def count(self, numel: int, at: Moment) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """Reads `at.unsent`, which is (numel,)."""
        k = self.count(x.numel(), at)
        if at.unsent is None or k == 0:
            return topk_indices(x, k)
        threshold = float(torch.linalg.vector_norm(at.unsent, torch.inf))
        return exactly(x, threshold, k, at) if threshold > 0.0 else topk_indices(x, k)


def reused_threshold(ratio: float) -> ReusedThreshold:
    """Keep about the share `ratio` with the largest magnitudes, judged by what the last step left.

    >>> import torch
    >>> at = Moment(step=1, unit=0, rank=0, world=1, unsent=torch.tensor([0.0, 0.5, 0.4, 0.1]))
    >>> reused_threshold(0.5).select(torch.tensor([3.0, 0.6, 0.4, 0.2]), at)
    tensor([0, 1])
    """
    return ReusedThreshold(check_ratio(ratio))
