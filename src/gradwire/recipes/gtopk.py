"""gtopk: a tree merges the ranks' own top-k into one choice for all (Shi et al. 2019).

Differences from the paper: the tree elects places, and all ranks send what they have there, so that nothing
is lost in a branch (see `gradwire.exchange.gtop_k`); per unit, not fused over the gradient.
"""

from gradwire.exchange.compose import remember
from gradwire.exchange.gtop_k import gtop_k
from gradwire.recipes.base import Composition, register


@register
def gtopk(ratio: float = 0.01) -> Composition:
    """The top-k of a tree of merged top-k with error feedback: traffic grows with the world's logarithm.

    Travels: merged choices of places up a tree, and everybody's values at the winner's.
    Paper: Shi et al. 2019, "A distributed synchronous SGD algorithm with global top-k sparsification".
    Use when: comparing with it: a leader's choice costs less and serves as well.
    """
    return Composition(remember(gtop_k(ratio)))
