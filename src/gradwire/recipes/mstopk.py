"""mstopk: a threshold found by bisection instead of a sort (Shi et al. 2021, "Towards scalable distributed
training of deep learning on public cloud clusters", section III).

Differences from the paper: see `gradwire.codec.select.mstopk`; per unit; one all-gather, no hierarchy.
"""

from gradwire.codec.select.mstopk import ms_top_k
from gradwire.exchange.compose import remember
from gradwire.exchange.gather import gather
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded


@register
def mstopk(ratio: float = 0.01, rounds: int = 25, values: CodedValues = "full") -> Composition:
    """Approximate top-k by bisection with error feedback, all-gathered.

    Travels: places and values of every rank's own choice.
    Paper: Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters".
    Use when: comparing with it: on CPUs the exact choice is no slower.
    """
    return Composition(remember(gather(coded(ms_top_k(ratio, rounds), values))))
