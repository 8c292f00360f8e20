"""signsgd: a majority vote on signs, without a memory (Bernstein et al. 2018).

Differences from the paper: see `gradwire.exchange.majority`. The default `scale="l1"` keeps the size of a
gradient, so that learning rates, clipping and the parameters that travel densely keep their meaning;
`scale="none"` is the paper's ±1, for which vectors and tiny tensors vote too, and the learning rate is the
step of every parameter: take a thousandth of SGD's, or Adam's.
"""

from gradwire.exchange.compose import forget
from gradwire.exchange.majority import Scale, majority_vote
from gradwire.recipes.base import Composition, register


@register
def signsgd(scale: Scale = "l1") -> Composition:
    """The sign that most ranks have, times the mean magnitude of the parameter; a tie is 0.

    Travels: one bit per element to be counted, two bits per result.
    Paper: Bernstein et al. 2018, "signSGD: compressed optimisation for non-convex problems".
    Use when: there are many ranks, some of which may be wrong, and a biased gradient does no harm.
    """
    exchange = forget(majority_vote(scale))
    units = scale == "none"
    return Composition(exchange, tiny=f"signsgd({scale=})" if units else "dense", alone=units)
