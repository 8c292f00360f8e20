"""auto: the least compression that hides communication behind the backward pass.

Simple for now: it looks at CCR alone and knows three answers. Linear cost of bytes is assumed, latency
and the codec's own time are not weighed.
"""

from dataclasses import replace
from functools import partial

from gradwire.plan import Facts
from gradwire.recipes.base import Composition, Decide, register
from gradwire.recipes.dense import dense
from gradwire.recipes.fp16 import fp16
from gradwire.recipes.leader_topk import leader_topk


@register
def auto(target: float = 0.95) -> Decide:
    """Measure, then choose dense, fp16 or leader_topk: the least that reaches linear scaling.

    Travels: what the choice sends; dense while it measures.
    Paper: COVAP's criterion (Meng et al. 2023, section III-C) as the rule for all.
    Use when: first of all, and read in `wire.report()` what it chose.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    return partial(from_facts, target=target)


def from_facts(facts: Facts, target: float) -> Composition:
    """The least compression under which the wire needs at most 1/target of the backward pass."""
    share = 1.0 / (target * facts.ccr) if facts.ccr > 0 else 1.0
    if share >= 1.0:
        return _because(dense(), facts, "communication hides behind backward as it is")
    if share >= 0.5:
        return _because(fp16(), facts, "half the bytes hide behind backward")
    share *= BUSY
    # Not below what the text of a ratio can say: tiny models measure absurd CCRs.
    ratio = max(round(affordable_ratio(4.0 * share), 4), 1e-4)
    chosen = leader_topk(ratio, values="fp16")
    return _because(chosen, facts, f"{share:.0%} of the bytes hide behind backward")


BUSY = 0.75
"""Share of the backward pass in which the wire can be busy: before the first gradient it has nothing to do,
and the last unit, which needs two rounds and the verdict, should be all that is left at the end."""


def affordable_ratio(budget_bytes: float) -> float:
    """The share of elements for which 16-bit values and their places fit into so many bytes per element.

    A place costs 4 bytes in a list, or 1/8 byte for every element of the unit in a bitmap: what is shorter
    is sent.

    >>> affordable_ratio(0.875), affordable_ratio(0.06)
    (0.375, 0.01)
    """
    return max((budget_bytes - 1 / 8) / 2, budget_bytes / 6)


def _because(chosen: Composition | Decide, facts: Facts, reason: str) -> Composition:
    assert isinstance(chosen, Composition)
    times = f"all-reduce {facts.allreduce_s * 1e3:.0f} ms, backward {facts.backward_s * 1e3:.0f} ms"
    return replace(chosen, why=f"CCR {facts.ccr:.2f} ({times}): {reason}")
