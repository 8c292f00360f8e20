"""star_topk, var_topk, ar_topk: the indices of one rank's top-k for all ranks, values by all-reduce.

Tyagi and Swany 2023, "Flexible communication for optimal distributed learning over unpredictable networks",
section 3. Differences from the paper: see `gradwire.exchange.ar_topk`; vectors and tiny tensors travel
densely beside what is fused; a tree is not pipelined; `ar_topk` chooses between the paper's two elections.
"""

from gradwire.codec.select.topk import top_k
from gradwire.comm.base import Algorithm, Broadcasting
from gradwire.exchange.ar_topk import Election
from gradwire.exchange.ar_topk import ar_topk as exchange_of
from gradwire.exchange.compose import remember
from gradwire.exchange.round_robin import Order
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import Values, dtype_of
from gradwire.recipes.units import fused_cutter


@register
def star_topk(
    ratio: float = 0.1,
    fused: bool = True,
    values: Values = "full",
    algorithm: Algorithm = "library",
    *,
    order: Order = "random",
) -> Composition:
    """The indices of one rank's top-k for all ranks, which lead in turn, with error feedback.

    Traffic does not grow with the number of ranks.

    Travels: the leader's indices once, and all ranks' values at these indices.
    Paper: Tyagi and Swany 2023, "Flexible communication for optimal distributed learning", STAR-Topk.
    Use when: the ranks' data are alike, the network is 2 to 10 times too slow, and one choice for the whole
        gradient should beat overlap. Each rank leads in one of N steps; the paper expects that choices get
        stale on very many ranks.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
        fused: choose once from the whole gradient, after the backward pass. False chooses unit by unit, which
            overlaps with it.
        values: "full" sends values in the gradient's type; other names shorten them.
        algorithm: the all-reduce of the values: "library" is torch's.
        order: "random" draws the order of the turns anew every three cycles. In the order "paper", rank i mod
            N leads in step i.
    """
    return _composed("round_robin", ratio, fused, values, algorithm, order)


@register
def var_topk(
    ratio: float = 0.1, fused: bool = True, values: Values = "full", algorithm: Algorithm = "library"
) -> Composition:
    """The indices of the rank whose top-k has the largest norm, for all ranks, with error feedback.
    Travels: a norm per rank, the leader's indices, and all ranks' values at these indices.
    Paper: Tyagi and Swany 2023, "Flexible communication for optimal distributed learning", VAR-Topk.
    Use when: ranks' gradients differ in size, as on skewed shards, or (the paper's conjecture) ranks are very
        many. It costs more than star_topk: every rank selects in every step, and norms take a round.

    Args:
        ratio, fused, values, algorithm: as in `star_topk`.
    """
    return _composed("variance", ratio, fused, values, algorithm)


@register
def ar_topk(
    ratio: float = 0.1,
    elect: Election = "auto",
    fused: bool = True,
    values: Values = "full",
    algorithm: Algorithm = "library",
) -> Composition:
    """star_topk or var_topk in turn: the one that has lately sent the larger share of the gradient.

    Travels: one rank's choice of places, all ranks' values there, and what share they are.
    Paper: Tyagi and Swany 2023, "Flexible communication for optimal distributed learning", section 5:
        future work there, by test performance; here by the gain.
    Use when: it is unknown whether the ranks' gradients differ in size, or that changes.

    Args:
        elect: "round_robin" is star_topk, "variance" is var_topk, "auto" chooses between them.
        ratio, fused, values, algorithm: as in `star_topk`.
    """
    return _composed(elect, ratio, fused, values, algorithm)


def _composed(
    elect: Election, ratio: float, fused: bool, values: Values, algorithm: Algorithm, order: Order = "random"
) -> Composition:
    # With a tree no rank waits for more than ⌈log2 N⌉ hops in a row; the library's broadcast is one, too.
    broadcast: Broadcasting = "library" if algorithm == "tree" else "scatter"
    exchange = remember(exchange_of(top_k(ratio), elect, dtype_of(values), algorithm, broadcast, order))
    return Composition(exchange, fused_cutter(fused))
