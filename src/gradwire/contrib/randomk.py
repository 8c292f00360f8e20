"""Random-k: all ranks send the same random elements, drawn from a shared seed. No index travels.

Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory".

Differences from the paper:

- The choice is made per unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.sparse import values
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import reduce
from gradwire.kernels.draws import sample_indices
from gradwire.kernels.uploads import sent_to
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.unit.context import ExchangeContext

sampled = lru_cache(maxsize=32)(sample_indices)


@dataclass(frozen=True)
class RandomK:
    """Uniformly random elements, the same on all ranks."""

    ratio: float
    laws = Laws(shared=True, contractive=True, fixed_size=True, stays_on_device=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Draw `count` indices uniformly without replacement; the same on all ranks."""
        seed = int(torch.randint(2**62, (1,), generator=ctx.shared(), device="cpu"))
        return sent_to(sampled(x.numel(), self.count(x.numel(), ctx), seed), x.device)


def random_k(ratio: float) -> RandomK:
    """Keep a uniformly random share `ratio`."""
    return RandomK(check_ratio(ratio))


@register
def randomk(ratio: float = 0.01) -> Composition:
    """Random elements from a shared seed with error feedback, all-reduced without indices.

    Travels: values at random places that all ranks know.
    Paper: Stich et al. 2018, "Sparsified SGD with memory".
    Use when: as a baseline: it costs least to choose and loses most.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
    """
    return Composition(remember(reduce(values(random_k(ratio)))))
