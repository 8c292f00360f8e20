"""randomk: the same random elements on all ranks, from a shared seed, so that no index travels.

(Stich et al. 2018, "Sparsified SGD with memory".) Differences from the paper: the choice is made per unit.
"""

from gradwire.codec.select.random import random_k
from gradwire.codec.sparse import values
from gradwire.exchange.compose import remember
from gradwire.exchange.reduce import reduce
from gradwire.recipes.base import Composition, register


@register
def randomk(ratio: float = 0.01) -> Composition:
    """Random elements from a shared seed with error feedback, all-reduced without indices.

    Travels: values at random places that all ranks know.
    Paper: Stich et al. 2018, "Sparsified SGD with memory".
    Use when: as a baseline: it costs least to choose and loses most.
    """
    return Composition(remember(reduce(values(random_k(ratio)))))
