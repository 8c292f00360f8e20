"""covap: send each unit every I-th step, I as large as communication is longer than computation.

Meng et al. 2023, "Near-Linear Scaling Data Parallel Training with Overlapping-Aware Gradient
Compression". Differences from the paper: cuts are placed so that each phase carries equal bytes,
spread over the whole backward pass, instead of sharding units above the median; norms, biases and
other tiny tensors travel densely every step.
"""

from functools import partial

from gradwire.exchange import dense, every, remember
from gradwire.memory import Residual
from gradwire.plan import Facts, interval_for, phased_cuts
from gradwire.recipes.base import Composition, Decide, register


@register
def covap(interval: int | None = None) -> Composition | Decide:
    """Each unit every I-th step with error feedback; without an interval, I from the measured CCR.

    Travels: one unit in I, whole.
    Paper: Meng et al. 2023, "Near-linear scaling data parallel training with overlapping-aware gradient
        compression".
    Use when: the network is 2 to 4 times too slow and the codec must cost nothing; above that gradients
        get stale.
    """
    return from_facts if interval is None else compose(interval)


def compose(interval: int, why: str = "as configured") -> Composition:
    """The filter with its scheduled memory and cuts; at interval 1 nothing is filtered or remembered."""
    text = f"covap(interval={interval})"
    if interval == 1:
        return Composition(dense(), why=why, text=text)
    exchange = remember(every(interval, dense()), schedule(interval))
    cutter = partial(phased_cuts, interval=interval)
    return Composition(exchange, cutter, why, text=text)


def schedule(interval: int) -> Residual:
    """The two settings of the authors' code: the paper gives no values (section III-D)."""
    return Residual(0.5, 0.1, 50) if interval <= 8 else Residual(0.2, 0.1, 100)


LONGEST = 64
"""No measured interval is longer: tiny models measure absurd CCRs, and a unit must travel now and then."""


def from_facts(facts: Facts) -> Composition:
    """I = ⌈CCR⌉, so that what is sent takes as long as the backward pass."""
    interval = min(interval_for(facts.ccr), LONGEST)
    stale = "; above 5 gradients get stale, consider leader_topk" if interval > 5 else ""
    return compose(interval, f"CCR {facts.ccr:.2f} needs every unit only each {interval}. step{stale}")
