"""efsignsgd, onebit: one bit per element, and one scale or two means, with error feedback.

Papers: efsignsgd by Karimireddy, Rebjock, Stich and Jaggi 2019, onebit by Seide, Fu, Droppo, Li and Yu 2014.
`gradwire.contrib.signs_by_vote` has votes of the ranks, without error feedback.

Differences from the papers, for both: every rank's bits are gathered. Vectors and tiny tensors are sent
densely, unless a policy says otherwise. A parameter divided by a boundary has its scale or means in each of
the two units, unless `layers` keeps it whole.

- efsignsgd: the paper's server averages the signs. The memory holds gradients, not gradients times learning
  rate, so a schedule of the rate applies to the unsent part in the step in which it is sent.
- onebit: two means per parameter, not per column. The paper aggregates stripes and quantizes the sums again.
  There is no warm-up on plain gradients and no AdaGrad.
"""

from gradwire.codec.signs import one_bit, sign
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.recipes.base import Composition, register
from gradwire.recipes.units import layer_cutter


@register
def efsignsgd(block: int | None = None, layers: bool = False) -> Composition:
    """Every rank's signs times their mean magnitude with error feedback, all-gathered.

    Travels: one bit per element, and a scale per parameter, or per `block` elements.
    Paper: Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes".
    Use when: a 32nd of the traffic is enough on two to four ranks, and all elements matter alike.

    Args:
        block: elements that share a scale, a multiple of 8; by default all of a parameter in a unit.
        layers: whether units hold whole parameters only.
    """
    return Composition(remember(gather(sign(block))), layer_cutter(layers))


@register
def onebit(block: int | None = None, layers: bool = False) -> Composition:
    """Every rank's signs with the mean of either side and error feedback, all-gathered.

    Travels: one bit per element, and two means per parameter, or per `block` elements.
    Paper: Seide et al. 2014, "1-bit stochastic gradient descent".
    Use when: as efsignsgd, and gradients are not centred at zero.

    Args:
        block: elements that share two means, a multiple of 8; by default all of a parameter in a unit.
        layers: whether units hold whole parameters only.
    """
    return Composition(remember(gather(one_bit(block))), layer_cutter(layers))
