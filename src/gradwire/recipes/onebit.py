"""onebit: one bit per element and two means, with error feedback (Seide, Fu, Droppo, Li and Yu 2014).

Differences from the paper: two means per parameter, not per column; every rank's bits are gathered, where the
paper aggregates stripes and quantizes the sums again; vectors and tiny tensors travel densely; no warm-up on
plain gradients and no AdaGrad of its own; a parameter that a cut divides has its means in each of the two
units, unless `layers` keeps it whole.
"""

from gradwire.codec.signs import one_bit
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.recipes.base import Composition, register
from gradwire.recipes.units import layer_cutter


@register
def onebit(block: int | None = None, layers: bool = False) -> Composition:
    """Every rank's signs with the mean of either side and error feedback, all-gathered.

    Travels: one bit per element, and two means per parameter, or per `block` elements.
    Paper: Seide et al. 2014, "1-bit stochastic gradient descent".
    Use when: as efsignsgd, and gradients are not centred at zero.
    """
    return Composition(remember(gather(one_bit(block))), layer_cutter(layers))
