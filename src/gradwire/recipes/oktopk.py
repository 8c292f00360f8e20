"""oktopk: a sparse all-reduce of every rank's own top-k, below 6k words on any world (Li and Hoefler 2022).

Differences from the paper: fixed sizes, exact choices in each step and per unit, no balancing round (see
`gradwire.exchange.ok_topk`). As in the paper, what a rank sent and the final choice leaves out stays with it.
"""

from gradwire.codec import top_k
from gradwire.exchange import ok_topk, remember
from gradwire.recipes.base import Composition, register


@register
def oktopk(ratio: float = 0.01) -> Composition:
    """Every rank's own top-k, added region by region, the largest sums for all: traffic below 6k words.

    Travels: every rank's own choice to the owners of regions, and the owners' choice to all.
    Paper: Li and Hoefler 2022, "Near-optimal sparse allreduce for distributed deep learning".
    Use when: there are many ranks and their own choices differ.
    """
    return Composition(remember(ok_topk(top_k(ratio))))
