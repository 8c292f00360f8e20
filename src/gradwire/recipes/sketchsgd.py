"""sketchsgd: the largest sums over all ranks, found in a sum of count sketches (Ivkin et al. 2019).

Differences from the paper: all-reduces instead of a server, so that every rank finds the places itself (see
`gradwire.exchange.sketch`); per unit; the memory is of elements, and momentum is the optimizer's.
"""

from gradwire.exchange.compose import remember
from gradwire.exchange.sketch import sketch
from gradwire.recipes.base import Composition, register


@register
def sketchsgd(ratio: float = 0.01) -> Composition:
    """The largest sums over all ranks, found by count sketches: no index travels, traffic constant.

    Travels: a table of sums, and values of the largest estimates.
    Paper: Ivkin et al. 2019, "Communication-efficient distributed SGD with sketching".
    Use when: comparing with it: the table costs a pass per row in encoding and decoding.
    """
    return Composition(remember(sketch(ratio)))
