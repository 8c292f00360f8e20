"""topk: each rank sends its own largest elements (Aji and Heafield 2017; Stich et al. 2018).

Differences from the papers: the choice is made per unit, not per layer or over the whole gradient;
indices and values share one buffer, so there is one collective per unit.
"""

from gradwire.codec import sparse, top_k
from gradwire.exchange import gather, remember
from gradwire.recipes.base import Composition, register


@register
def topk(ratio: float = 0.01) -> Composition:
    """Every rank's own top-k with error feedback, all-gathered: traffic grows with the world."""
    return Composition(f"topk(ratio={ratio!r})", remember(gather(sparse(top_k(ratio)))))
