"""signum: a majority vote on the signs of every rank's own momentum (Bernstein et al. 2018, algorithm 2).

Differences from the paper: as for `signsgd`. Vectors and tiny tensors vote too, since nobody else would apply
momentum to them. A parameter whose gradient is exactly zero on a rank keeps its momentum there in that step
and does not vote; in the paper the momentum would decay and vote.
"""

from gradwire.exchange.compose import forget
from gradwire.exchange.majority import Scale, majority_vote
from gradwire.memory import Signum
from gradwire.recipes.base import Composition, register


@register
def signum(momentum: float = 0.9, scale: Scale = "l1") -> Composition:
    """The sign of momentum that most ranks have; for SGD without a momentum of its own.

    Travels: one bit per element to be counted, two bits per result.
    Paper: Bernstein et al. 2018, "signSGD: compressed optimisation for non-convex problems".
    Use when: as signsgd, and gradients are noisy: signs of averages are wrong less often.
    """
    exchange = forget(majority_vote(scale), Signum(momentum))
    return Composition(exchange, tiny=f"signum({momentum=}, {scale=})", alone=scale == "none")
