"""auto: the fastest recipe within a limit of lateness, found by trials.

First, dense steps are timed as a whole. If communication hides in them, dense stays. Otherwise some more
steps are timed in parts, and the cost model predicts a step of every candidate. The predictions decide which
trials are worth it. A trial is training: it measures the step time and the lateness of a recipe
(`gradwire.recipes.trial`). The choice is a pure function of numbers on which all ranks agree
(`gradwire.planning.choice`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from gradwire.planning.change_detection import deviation, error_of
from gradwire.planning.choice import ASSUMED_OFF, CERTAIN, LATE, Comparison, Option
from gradwire.planning.facts import Facts
from gradwire.planning.profiler import ORDINARY
from gradwire.quantities import ms_text
from gradwire.recipes.base import Composition, Decision, register
from gradwire.recipes.dense import dense, measured_for
from gradwire.recipes.trial import DECIDED, Again, on_trial, watched

CANDIDATES: dict[str, float] = {
    "gcomp": 0.0,
    "fp16": 0.0004,
    "bf16(sum='fp32')": 0.0025,
    "bf16": 0.003,
    "int8": 0.01,
    "int8(collective='all_gather')": 0.01,
    "fp8": 0.04,
    "int4": 0.18,
    "int4(collective='all_gather')": 0.12,
    "topk(ratio=0.1, values='fp16')": 1.2,
    "topk(ratio=0.03, values='fp16')": 2.5,
    "topk(ratio=0.01, values='fp16')": 5.0,
    "topk(ratio=0.003, values='fp16')": 10.0,
    "topk(ratio=0.001, values='fp16')": 20.0,
    "leader_topk(ratio=0.1, values='fp16')": 1.6,
    "leader_topk(ratio=0.03, values='fp16')": 3.2,
    "leader_topk(ratio=0.01, values='fp16')": 6.5,
    "leader_topk(ratio=0.003, values='fp16')": 13.0,
    "leader_topk(ratio=0.001, values='fp16')": 26.0,
    "powersgd(rank=8)": 1.2,
    "powersgd(rank=4)": 1.8,
    "powersgd(rank=2)": 2.8,
    "powersgd(rank=1)": 4.0,
    "acpsgd(rank=8)": 1.6,
    "acpsgd(rank=4)": 2.5,
    "acpsgd(rank=2)": 3.8,
    "acpsgd(rank=1)": 5.5,
    "covap(interval=2)": 0.7,
    "covap(interval=3)": 1.0,
    "covap(interval=4)": 1.4,
    "efsignsgd": 5.0,
}
"""Recipes with their assumed lateness, in steps' worth of gradient that wait in memory. It orders trials and
is never shown. The order comes from trainings of two models, with interpolated values for the rest. Casts
have no memory and count with their error."""

WITHIN_ANY = 0.005
"""Assumed error up to which a recipe without memory is within any limit. It is not measured."""


@register
def auto(target: float = 0.95, late: float = LATE) -> Composition:
    """Measure, try what promises to be faster, and run the fastest recipe that leaves little late.

    Travels: what the choice sends; dense while it measures.
    Paper: COVAP's criterion (Meng et al. 2023, section III-B) as the rule for all.
    Use when: first of all, and read in `wire.report()` what it chose.

    Args:
        target: the share of the speed without communication that is wanted. If a recipe reaches it, none that
            compresses more runs.
        late: a recipe may run if at most this many steps' worth of gradient wait in its memory, as measured
            in the steps that it runs. Within the default limit are near-lossless frames, casts and eight
            bits; four bits are about at it. 0.3, 1 or 4 allows more compression, and loses quality.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    if not late >= 0.0:
        raise ValueError(f"late={late} is negative, the steps' worth of gradient that may wait in memory")
    again = partial(auto, target, late)
    worth = {text: may_be_within(late, steps) for text, steps in CANDIDATES.items()}
    return measured_for(
        Decision(
            lambda facts: chosen_by(facts, comparison_of(facts, target, late), again),
            whole_steps=True,
            candidates=("dense", *(text for text in CANDIDATES if worth[text])),
            foreseen=tuple(text for text in CANDIDATES if not worth[text]),
            hidden=lambda exposed: dense_where_hidden(exposed, target, late, again),
            resume=lambda composition: watched(composition, again, late),
        )
    )


def comparison_of(facts: Facts, target: float, late: float) -> Comparison:
    """The options that follow from the measured `facts`; `facts.dense_s` must be known.

    `target` is the share of linear to reach, and `late` the limit of lateness in steps' worth of gradient.
    Where a dense step took longer than predicted, the predictions of all others are longer by the same
    factor: they leave out the same.
    """
    assert facts.dense_s is not None, "asked for by `whole_steps`"
    before_s = 0.0 if facts.backward is None else facts.backward.before_s
    predicted = facts.forecasts.get("dense")
    longer = 1.0 if predicted is None else max((before_s + facts.dense_s) / predicted.step_s(), 1.0)
    options = [
        Option.of(text, facts.recut.get(text, text), found, CANDIDATES[text], longer)
        for text, found in facts.forecasts.items()
        if text != "dense"
    ]
    dense_bytes = 2 * (facts.world - 1) / facts.world * facts.gradient_bytes
    return Comparison(
        tuple(each for each in options if may_be_within(late, each.assumed)),
        before_s,
        facts.backward_s,
        facts.dense_s,
        dense_bytes,
        None if predicted is None else predicted.step_s() - before_s,
        facts.dense_s * error_of(facts.dense_noise, ORDINARY),
        target,
        late,
        facts.dense_noise,
        later=tuple(each for each in options if not may_be_within(late, each.assumed)),
    )


def dense_where_hidden(
    exposed: Sequence[float], target: float, late: float, again: Again
) -> Composition | None:
    """Dense, if communication is hidden so well that dense certainly reaches `target`; else `None`.

    Args:
        exposed: for each dense step, the share in which it waited for communication.
        target: the share of linear to reach.
        late: the limit of lateness, in steps' worth of gradient, for what follows.
        again: makes the next decision.

    The test uses the upper confidence bound of the share. It ignores that communication may slow down
    computation.
    """
    most = median(exposed) + CERTAIN * error_of(deviation(exposed), len(exposed))
    if most >= 1.0 - target:
        return None
    why = f"communication hides as it is: at most {most:.1%} of a step waits for it"
    return watched(replace(dense(), why=why), again, late)


def may_be_within(late: float, assumed: float) -> bool:
    """True if a recipe with this assumed lateness, or error, is worth a trial under the limit `late`."""
    return assumed <= max(ASSUMED_OFF * late, WITHIN_ANY)


def chosen_by(facts: Facts, comparison: Comparison, again: Again) -> Composition:
    """The recipe of the first trial, by the options of `comparison`; dense if none is worth it. `facts` are
    quoted as the reason, and `again` makes the next decision.
    """
    first = comparison.next_trial()
    digits = 0 if min(facts.allreduce_s, facts.backward_s) >= 0.01 else 1
    times = f"all-reduce {ms_text(facts.allreduce_s, digits)}, backward {ms_text(facts.backward_s, digits)}"
    measured = f"CCR {facts.ccr:.2f} ({times})"
    if first is not None:
        tried = on_trial(first.recipe, comparison, again, left=DECIDED - facts.steps)
        return replace(tried, why=f"{measured}; {tried.why}")
    table, why = comparison.table("dense"), f"{measured}: {why_dense(comparison)}"
    return watched(replace(dense(), why=why, table=table), again, comparison.limit)


def why_dense(comparison: Comparison) -> str:
    """Why no other recipe is tried, in words."""
    dense_s = comparison.dense_s
    if comparison.dense_hides:
        share = comparison.share_of_linear(dense_s)
        return f"communication hides as it is: scaling efficiency is {share:.0%}"
    step = f"the {ms_text(comparison.before_s + dense_s)} of dense"
    why = f"no recipe that may run is predicted to be faster than {step}"
    return f"{why}{comparison.missed(dense_s)}{comparison.offer()}"
