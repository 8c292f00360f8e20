"""adacomp: whatever comes near its bin's largest element (Chen et al. 2018, "AdaComp: adaptive residual
gradient compression for data-parallel distributed training").

Differences from the paper: see `gradwire.codec.select.adacomp`; values travel as they are; no rank sends more
than a stated share.
"""

from gradwire.codec.select.adacomp import ada_comp
from gradwire.exchange.agreed import agreed
from gradwire.exchange.compose import remember
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import Values, dtype_of


@register
def adacomp(bin_elements: int = 500, at_most: float = 0.1, values: Values = "full") -> Composition:
    """Elements near their bin's largest with error feedback, all-gathered in the largest size.

    Travels: counts; then places and values, as many as the rank with the most has.
    Paper: Chen et al. 2018, "AdaComp: adaptive residual gradient compression".
    Use when: the right ratio is unknown and may change during training.
    """
    return Composition(remember(agreed(ada_comp(bin_elements, at_most), dtype_of(values))))
