"""lwtopk: each rank sends the largest elements of every layer (Lin et al. 2018; Aji and Heafield 2017).

Differences from the papers: layers that share a unit share one collective; a layer that a cut divides is
chosen from in parts.
"""

from gradwire.codec.select.layers import layer_top_k
from gradwire.exchange.compose import remember
from gradwire.exchange.gather import gather
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded


@register
def lwtopk(ratio: float = 0.01, values: CodedValues = "full") -> Composition:
    """Every rank's own top-k of each layer with error feedback, all-gathered.

    Travels: places and values of every rank's own choice, a share of each layer.
    Paper: Aji and Heafield 2017, "Sparse communication for distributed gradient descent".
    Use when: layers differ so much in scale that a choice over all of them would starve some.
    """
    return Composition(remember(gather(coded(layer_top_k(ratio), values))))
