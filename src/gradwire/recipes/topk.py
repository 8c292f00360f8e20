"""topk: each rank sends its own largest elements (Aji and Heafield 2017; Stich et al. 2018).

Differences from the papers: the selection is made per unit, and over the whole gradient only with `fused`.
Indices and values share one buffer, so there is one collective per unit. Values may have 16, 8 or 4 bits.
With `reuse`, the threshold comes from the previous step's unsent part.
"""

from gradwire.codec.select.base import Selector
from gradwire.codec.select.topk import top_k
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded
from gradwire.recipes.units import fused_cutter


@register
def topk(
    ratio: float = 0.01, values: CodedValues = "full", reuse: bool = False, fused: bool = False
) -> Composition:
    """Every rank's own top-k with error feedback, all-gathered: traffic grows with the world.

    Travels: places and values of every rank's own choice.
    Paper: Aji and Heafield 2017; Stich et al. 2018, "Sparsified SGD with memory".
    Use when: there are two to four ranks: all-gather grows with their number.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
        values: "full" sends values in the gradient's type; "fp16", "bf16", "int8", "int4" and "int2" shorten
            them.
        reuse: take the threshold from the previous step's unsent part, instead of an exact selection.
        fused: select once from the whole gradient, after the backward pass. By default every unit is selected
            from as soon as it is ready.
    """
    selector: Selector = top_k(ratio)
    if reuse:
        from gradwire.codec.select.threshold import reused_threshold  # here: what is imported is compiled

        selector = reused_threshold(ratio)
    exchange = remember(gather(coded(selector, values)))
    return Composition(exchange, fused_cutter(fused))
