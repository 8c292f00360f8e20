"""sidco: a threshold from a fitted distribution (Abdelmoniem et al. 2021, "An efficient statistical-based
gradient compression technique for distributed training systems").

Differences from the paper: see `gradwire.codec.select.sidco`; per unit.
"""

from gradwire.codec.select.sidco import Fit
from gradwire.codec.select.sidco import sidco as by_fit
from gradwire.exchange.compose import remember
from gradwire.exchange.gather import gather
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded


@register
def sidco(
    ratio: float = 0.01, stages: int = 3, fit: Fit = "exponential", values: CodedValues = "full"
) -> Composition:
    """Approximate top-k by a statistical threshold with error feedback, all-gathered.

    Travels: places and values of every rank's own choice.
    Paper: Abdelmoniem et al. 2021, "An efficient statistical-based gradient compression technique".
    Use when: comparing with it, or where a sort is slow and gradients follow the fitted law.
    """
    return Composition(remember(gather(coded(by_fit(ratio, stages, fit), values))))
