"""auto: the least compression that hides communication behind the backward pass, if it beats dense.

CCR gives the order of the candidates: first the least compression that would hide, at a linear cost of bytes.
The cost model predicts how long a step of each takes, with the latency of every round, and compares that with
ordinary dense steps, which were measured and take as long as plain DDP. A candidate that is not predicted to
be faster is skipped. The first other one runs on trial (`gradwire.recipes.trial`), because the model knows
neither the cost of its codec nor the effect of shared cores. If its steps are not faster, dense comes back.

Where 8 or 4 bits suffice between two ranks, every element travels in every step: with error feedback that
loses less than a choice at the same bytes (`docs/choosing.md`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from gradwire.codec.indices import bits_per_index
from gradwire.comm.base import Round
from gradwire.exchange.base import steady_rounds
from gradwire.planning.collectives import Transfer
from gradwire.planning.facts import Facts
from gradwire.planning.predict import Tail, step_from_facts
from gradwire.recipes.base import Composition, Decision, register
from gradwire.recipes.dense import dense, measured_for
from gradwire.recipes.fp16 import fp16
from gradwire.recipes.int4 import int4
from gradwire.recipes.int8 import int8
from gradwire.recipes.leader_topk import leader_topk
from gradwire.recipes.topk import topk
from gradwire.recipes.trial import on_trial


@register
def auto(target: float = 0.95) -> Composition:
    """Measure, then choose dense, fp16, int8, int4, topk or leader_topk: the least that hides and is faster.

    Travels: what the choice sends; dense while it measures.
    Paper: COVAP's criterion (Meng et al. 2023, section III-C) as the rule for all.
    Use when: first of all, and read in `wire.report()` what it chose.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    return measured_for(Decision(partial(from_facts, target=target), whole_steps=True))


def from_facts(facts: Facts, target: float) -> Composition:
    """The first candidate that is predicted to beat dense, on trial; dense if none is.

    Facts without the time of a dense step, or without ready times and links, refuse no candidate.
    """
    share = 1.0 / (target * facts.ccr) if facts.ccr > 0 else 1.0
    if share >= 1.0:
        return _because(dense(), facts, "communication hides behind backward as it is")
    skipped: list[str] = []
    for candidate in candidates(facts, share):
        predicted_s = predicted(candidate, facts)
        if facts.dense_s is None or predicted_s is None:
            return candidate
        if predicted_s < (1.0 - LEAD) * facts.dense_s:
            expected = f"predicted to take {_ms(predicted_s)} where dense takes {_ms(facts.dense_s)}"
            return on_trial(replace(candidate, why=f"{candidate.why}; {expected}"), facts.dense_s)
        skipped.append(f"{candidate.text.split('(')[0]} {_ms(predicted_s)}")
    assert facts.dense_s is not None, "otherwise the first candidate would have been taken"
    return _because(
        dense(),
        facts,
        f"nothing is predicted to be faster than the {_ms(facts.dense_s)} of dense: {', '.join(skipped)}",
    )


LEAD = 0.05
"""The share by which a candidate must be predicted to be faster than dense. Half the bytes on a link that is
all latency are faster by nothing that could be measured."""

BUSY = 0.6
"""Share of the backward pass in which the wire may be busy: before the first gradient it has nothing to do,
the last unit, which needs two rounds and the verdict, should be all that is left at the end, and where
computing fills the cores, whatever is coded makes the backward pass itself longer."""

BUSY_CODES = 0.7
"""The same for codes of all elements: two ranks make them in less processor time than a choice, and they come
in whole bits, so that the next step down would be a choice."""


def candidates(facts: Facts, share: float) -> Iterator[Composition]:
    """What may run where `share` of the bytes would hide: the least compression that hides first.

    Then what compresses more, and at last what does not hide but sends less than dense, the fewest bytes
    first. A choice of elements hides by its ratio.
    """
    # Between two ranks an all-gather of codes costs what an all-reduce does, in one round, not two. More
    # ranks need the two, which cost more processor time than a choice does.
    two = facts.world == 2
    codes = [few_bits(collective="all_gather" if two else "all_reduce") for few_bits in (int8, int4)]
    limits = [(fp16(), share), *((code, BUSY_CODES * share if two else 0.0) for code in codes)]
    late = []
    for candidate, limit in limits:
        needed = bytes_against_dense(candidate, facts)
        if needed < 1.0:
            told = _hidden(candidate, facts, needed)
            if needed <= limit:
                yield told
            else:
                late.append(told)
    share *= BUSY
    # Not below what the text of a ratio can say: tiny models measure absurd CCRs.
    ratio = max(round(affordable_ratio(share * _bytes_per_element(facts)), 4), 1e-4)
    # Here, too: what both choose for themselves costs what a leader's choice does.
    chosen = topk(ratio, values="fp16") if two else leader_topk(ratio, values="fp16")
    yield _hidden(chosen, facts, share)
    yield from reversed(late)


def predicted(composition: Composition, facts: Facts) -> float | None:
    """Seconds from the start of the backward pass to the verdict, as `Facts.dense_s` counts.

    It assumes that all parameters travel by `composition` and that its codec is free. A composition without
    memory keeps DDP's buckets. `None` where ready times or links were not measured.
    """
    if facts.backward is None:
        return None
    exchange, world, numel = composition.exchange, facts.world, facts.backward.numel
    cuts = facts.bucket_cuts if exchange.memory is None else composition.cutter(numel)
    found = step_from_facts(
        facts,
        range(len(numel)),
        cuts,
        lambda _index, elements: steady_rounds(exchange, elements, world),
        Tail(Transfer("all_reduce", ROW_BYTES * world)),
    )
    return None if found is None else found.step_s - facts.backward.before_s


ROW_BYTES = 36.0
"""Of a rank's row in the verdict: its latency counts, and its bytes hardly do."""


def bytes_against_dense(composition: Composition, facts: Facts) -> float:
    """Bytes against those of the gradient as it is, of many elements in one parameter.

    >>> bytes_against_dense(fp16(), Facts(1.0, 1.0, world=3))
    0.5
    """
    numel, world = 1 << 20, max(facts.world, 2)
    bytes_ = sum(each.wire_bytes(world) for each in steady_rounds(composition.exchange, numel, world))
    as_it_is = Round("all_reduce", numel, torch.uint8).wire_bytes(world) * _bytes_per_element(facts)
    return bytes_ / as_it_is


def _bytes_per_element(facts: Facts) -> float:
    """Of the gradient; float32 if it has not been measured."""
    if facts.backward is None or facts.gradient_bytes == 0.0:
        return 4.0
    return facts.gradient_bytes / sum(facts.backward.numel)


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
    long = (
        f"within {busy:.0%} of the backward pass" if busy < 2.0 else f"in {busy:.1f} times the backward pass"
    )
    return _because(chosen, facts, f"{share:.0%} of the bytes travel {long}")


def _because(chosen: Composition, facts: Facts, reason: str) -> Composition:
    times = f"all-reduce {facts.allreduce_s * 1e3:.0f} ms, backward {facts.backward_s * 1e3:.0f} ms"
    return replace(chosen, why=f"CCR {facts.ccr:.2f} ({times}): {reason}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
