"""Random elements from the shared generator, so that no index travels (Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select.base import SelectorLaws, check_ratio, count_kept
from gradwire.kernels import sample_indices
from gradwire.moment import Moment


@dataclass(frozen=True)
class RandomK:
    """Uniformly random elements, the same on all ranks."""

    ratio: float
    laws = SelectorLaws(shared=True, contractive=True, fixed_size=True)

    def count(self, numel: int, at: Moment) -> int:
        """See `Selector.count`."""
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`. Uniform without replacement."""
        seed = int(torch.randint(2**62, (1,), generator=at.shared()))
        return sample_indices(x.numel(), self.count(x.numel(), at), seed).to(x.device)


def random_k(ratio: float) -> RandomK:
    """Keep a uniformly random share `ratio`."""
    return RandomK(check_ratio(ratio))
