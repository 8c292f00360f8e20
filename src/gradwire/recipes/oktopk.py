"""oktopk: a sparse all-reduce of every rank's own top-k, below 6k words for large k (Li and Hoefler 2022).

N ranks pay 2N² words beside those that grow with k, so small units on many ranks exceed the bound (4096
elements at 1 % on 8 ranks: 7k).

Differences from the paper: fixed sizes, exact choices in each step and per unit, no balancing round (see
`gradwire.exchange.ok_topk`). As in the paper, what a rank sent and the final choice leaves out stays with it.
"""

from gradwire.codec.select.topk import top_k
from gradwire.exchange.compose import remember
from gradwire.exchange.ok_topk import ok_topk
from gradwire.recipes.base import Composition, register


@register
def oktopk(ratio: float = 0.01) -> Composition:
    """Every rank's own top-k, added region by region, the largest sums for all: some 6k words.

    Travels: every rank's own choice to the owners of regions, and the owners' choice to all.
    Paper: Li and Hoefler 2022, "Near-optimal sparse allreduce for distributed deep learning".
    Use when: there are many ranks and their own choices differ.
    """
    return Composition(remember(ok_topk(top_k(ratio))))
