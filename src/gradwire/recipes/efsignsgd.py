"""efsignsgd: signs and a scale, with error feedback (Karimireddy, Rebjock, Stich and Jaggi 2019).

Differences from the paper: signs are gathered, not averaged by a server; the memory holds gradient, not
gradient times learning rate, so a schedule of the rate acts on what was left from the step in which it is
sent on; vectors and tiny tensors travel densely, unless a policy says otherwise; a parameter that a cut
divides has a scale in each of the two units, unless `layers` keeps it whole.
"""

from gradwire.codec.signs import sign
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
    """
    return Composition(remember(gather(sign(block))), layer_cutter(layers))
