"""leader_topk: one rank's top-k indices for all ranks (CLT-k of ScaleCom, STAR and VAR of AR-Topk).

Differences from the papers: per unit, not fused over the gradient; the order of turns is drawn anew every
three cycles (`gradwire.exchange.round_robin`); `elect="norm"` elects by the norm of all that a rank has, not
by that of its top-k as VAR does; indices are spread by an all-reduce (`gradwire.exchange.leader`), in the
shortest of three forms (`gradwire.codec.indices`); the memory's low-pass filter is off (β = 1) by default;
values may travel in 16 bits.
"""

from gradwire.codec.select.topk import top_k
from gradwire.exchange.compose import remember
from gradwire.exchange.leader import Elect, leader
from gradwire.memory import LowPass, Residual
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import Values, dtype_of


@register
def leader_topk(
    ratio: float = 0.01, elect: Elect = "round_robin", values: Values = "full", beta: float = 1.0
) -> Composition:
    """One leader's top-k for all ranks with error feedback: traffic constant in the world.

    Travels: one rank's choice of places once, and all ranks' values there.
    Paper: Chen et al. 2020, "ScaleCom", section 2; Tyagi and Swany 2023, AR-Topk.
    Use when: the network is more than 3 times too slow, on any number of ranks.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
        elect: "round_robin" lets ranks lead in turn; "norm" lets the rank with the largest norm lead.
        values: "full" sums values in the gradient's type; "fp16" and "bf16" shorten them.
        beta: share of the unsent part that enters the memory (`gradwire.memory.LowPass`); 1 is plain error
            feedback.
    """
    memory = LowPass(beta) if beta != 1.0 else Residual()
    exchange = remember(leader(top_k(ratio), elect, dtype_of(values)), memory)
    return Composition(exchange)
