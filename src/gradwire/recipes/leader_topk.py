"""leader_topk: one rank's top-k indices for everybody (CLT-k of ScaleCom, STAR and VAR of AR-Topk).

Differences from the papers: per unit, not fused over the gradient; indices are spread by an all-reduce
(see `gradwire.exchange.leader`); plain error feedback, no low-pass memory.
"""

from gradwire.codec import top_k
from gradwire.exchange import leader, remember
from gradwire.exchange.leader import Elect
from gradwire.recipes.base import Composition, register


@register
def leader_topk(ratio: float = 0.01, elect: Elect = "round_robin") -> Composition:
    """One leader's top-k for all ranks with error feedback: traffic constant in the world."""
    exchange = remember(leader(top_k(ratio), elect))
    return Composition(f"leader_topk(ratio={ratio!r}, elect={elect!r})", exchange)
