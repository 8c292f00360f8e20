"""auto: the least compression that hides communication behind the backward pass.

Simple for now: it looks at CCR alone and knows five answers. Linear cost of bytes is assumed, latency
and the codec's own time are not weighed. Where 8 or 4 bits suffice between two ranks, every element travels
in every step: with error feedback that loses less than a choice at the same bytes (`docs/choosing.md`).
"""

from dataclasses import replace
from functools import partial

import torch

from gradwire.codec.indices import bits_per_index
from gradwire.comm.base import Round
from gradwire.moment import Moment
from gradwire.plan import Facts
from gradwire.recipes.base import Composition, Decide, register
from gradwire.recipes.dense import dense
from gradwire.recipes.fp16 import fp16
from gradwire.recipes.int4 import int4
from gradwire.recipes.int8 import int8
from gradwire.recipes.leader_topk import leader_topk
from gradwire.recipes.topk import topk


@register
def auto(target: float = 0.95) -> Decide:
    """Measure, then choose dense, fp16, int8, int4, topk or leader_topk: the least that hides.

    Travels: what the choice sends; dense while it measures.
    Paper: COVAP's criterion (Meng et al. 2023, section III-C) as the rule for all.
    Use when: first of all, and read in `wire.report()` what it chose.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    return partial(from_facts, target=target)


def from_facts(facts: Facts, target: float) -> Composition:
    """The least compression under which the wire needs at most 1/target of the backward pass.

    Below 16 bits it keeps a distance from that: see `BUSY`.
    """
    share = 1.0 / (target * facts.ccr) if facts.ccr > 0 else 1.0
    if share >= 1.0:
        return _because(dense(), facts, "communication hides behind backward as it is")
    if share >= 0.5:
        return _because(fp16(), facts, "half the bytes hide behind backward")
    if facts.world == 2:
        # An all-gather costs what an all-reduce does, in one round, not two. More ranks would need the two,
        # which cost more processor time than a choice does.
        for few_bits in (int8, int4):
            chosen = few_bits(collective="all_gather")
            needed = _share_of(chosen)
            if BUSY_CODES * share >= needed:
                return _hidden(chosen, facts, needed)
    share *= BUSY
    # Not below what the text of a ratio can say: tiny models measure absurd CCRs.
    ratio = max(round(affordable_ratio(4.0 * share), 4), 1e-4)
    # Here, too: what both choose for themselves costs what a leader's choice does.
    chosen = topk(ratio, values="fp16") if facts.world == 2 else leader_topk(ratio, values="fp16")
    return _hidden(chosen, facts, share)


BUSY = 0.6
"""Share of the backward pass in which the wire may be busy: before the first gradient it has nothing to do,
the last unit, which needs two rounds and the verdict, should be all that is left at the end, and where
computing fills the cores, whatever is coded makes the backward pass itself longer."""

BUSY_CODES = 0.7
"""The same for codes of all elements: two ranks make them in less processor time than a choice, and they come
in whole bits, so that the next step down would be a choice."""


def _share_of(composition: Composition) -> float:
    """Bytes against those of `dense` between two ranks, of many elements in one parameter."""
    numel, at = 1 << 20, Moment(step=0, unit=0, rank=0, world=2)
    sent = sum(each.wire_bytes(2) for each in composition.exchange.rounds(numel, torch.float32, at))
    return sent / Round("all_reduce", numel, torch.float32).wire_bytes(2)


_BISECTIONS = 40
"""Leave the ratio open by 2^-40: below any digit of a recipe's text."""


def affordable_ratio(budget_bytes: float) -> float:
    """The share of elements for which 16-bit values and their places fit into so many bytes per element.

    A place costs the less, the more there are; the sum grows with the ratio, which is found by bisection.

    >>> round(affordable_ratio(1.125), 4), round(affordable_ratio(0.03), 4)
    (0.5, 0.0098)
    """
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        ratio = (low + high) / 2
        affordable = ratio * (2.0 + bits_per_index(ratio) / 8) <= budget_bytes
        low, high = (ratio, high) if affordable else (low, ratio)
    return low


def _hidden(chosen: Composition, facts: Facts, share: float) -> Composition:
    busy = share * facts.ccr
    return _because(chosen, facts, f"{share:.0%} of the bytes travel within {busy:.0%} of the backward pass")


def _because(chosen: Composition | Decide, facts: Facts, reason: str) -> Composition:
    assert isinstance(chosen, Composition)
    times = f"all-reduce {facts.allreduce_s * 1e3:.0f} ms, backward {facts.backward_s * 1e3:.0f} ms"
    return replace(chosen, why=f"CCR {facts.ccr:.2f} ({times}): {reason}")
