"""allreduce: every value by an all-reduce of our own: ring, tree, or a parameter server (star). It compresses
nothing, and shows what an algorithm costs by itself.

Tyagi and Swany 2023, "Flexible communication for optimal distributed learning over unpredictable networks",
table I, for the costs; Li et al. 2014, "Scaling distributed machine learning with the parameter server",
for the star. The algorithms are in `gradwire.comm.algorithms`.

Differences from the paper:

- The parameter server is one of the ranks, and keeps no parameters: it sums gradients.
"""

from gradwire.comm.base import Algorithm
from gradwire.exchange.dense import dense
from gradwire.recipes.base import Composition, register


@register
def allreduce(algorithm: Algorithm = "star") -> Composition:
    """Plain all-reduce by a ring, a tree or a parameter server of our own.

    Travels: every value.
    Paper: Li et al. 2014, "Scaling distributed machine learning with the parameter server" (star).
    Use when: comparing with it, or where latency is all that counts: a tree takes log N hops, a star two.

    Args:
        algorithm: "library" is torch's all-reduce. The others send messages of our own along a "ring", a
            "tree" or a "star", or "direct": everything to each rank.
    """
    return Composition(dense(algorithm))
