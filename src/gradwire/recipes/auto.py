"""auto: of the recipes that leave little of the gradient late, run the mildest that hides its communication.

First, dense steps are timed as a whole, then in parts. The cost model predicts a step of every candidate. The
promising ones run on recorded gradients of all ranks, beside further dense steps. That shows what their
codecs cost and how much of the gradient they keep (`gradwire.engine.examining`). The choice among them is a
pure function of numbers that all ranks have agreed on (`gradwire.decide.choice`), and what is chosen runs on
trial first (`gradwire.recipes.trial`).
"""

from dataclasses import replace
from functools import partial

from gradwire.decide.choice import LATE, Option, Standing, margin_of, shortlist
from gradwire.planning.facts import Facts
from gradwire.recipes.base import Composition, Decision, register
from gradwire.recipes.dense import dense, measured_for
from gradwire.recipes.trial import COUNTED, DECIDED, Again, on_trial, watched

FAMILIES: tuple[dict[str, float], ...] = (
    {"gcomp": 0.0},
    {"fp16": 0.0004, "bf16": 0.003},
    {"int8": 0.01, "int4": 0.18},
    {"int8(collective='all_gather')": 0.01, "int4(collective='all_gather')": 0.18},
    {
        "topk(ratio=0.1, values='fp16')": 1.2,
        "topk(ratio=0.03, values='fp16')": 2.5,
        "topk(ratio=0.01, values='fp16')": 5.0,
        "topk(ratio=0.003, values='fp16')": 10.0,
        "topk(ratio=0.001, values='fp16')": 20.0,
    },
    {
        "leader_topk(ratio=0.1, values='fp16')": 1.6,
        "leader_topk(ratio=0.03, values='fp16')": 3.2,
        "leader_topk(ratio=0.01, values='fp16')": 6.5,
        "leader_topk(ratio=0.003, values='fp16')": 13.0,
        "leader_topk(ratio=0.001, values='fp16')": 26.0,
    },
    {"powersgd(rank=8)": 1.2, "powersgd(rank=4)": 1.8, "powersgd(rank=2)": 2.8, "powersgd(rank=1)": 4.0},
    {"acpsgd(rank=8)": 1.6, "acpsgd(rank=4)": 2.5, "acpsgd(rank=2)": 3.8, "acpsgd(rank=1)": 5.5},
    {"covap(interval=2)": 0.7, "covap(interval=3)": 1.0, "covap(interval=4)": 1.4},
    {"efsignsgd": 5.0},
)
"""Methods from mild to strong, each recipe with its assumed lateness: how many steps' worth of gradient wait
in memory. Trainings of two models have shown the order; between what ran there it is estimated. Casts have no
memory, and count with their error."""

CANDIDATES = {text: late for family in FAMILIES for text, late in family.items()}

FLOOR = 0.5
"""A recipe that keeps a smaller share of the gradient is not taken for its speed."""


@register
def auto(target: float = 0.95, floor: float = FLOOR, late: float = LATE) -> Composition:
    """Measure, predict every recipe, and run the mildest of those that hide communication.

    `target` is the speed to reach, as a share of that without communication. If no recipe is predicted to
    reach it, the fastest runs. Only recipes count that are assumed to leave at most `late` steps' worth of
    gradient in memory, and that were found to keep at least `floor` of recorded gradients. By default these
    are near-lossless frames, casts and few bits; `late=1`, or 5, allows more compression, and loses quality.

    Travels: what the choice sends; dense while it measures.
    Paper: COVAP's criterion (Meng et al. 2023, section III-C) as the rule for all.
    Use when: first of all, and read in `wire.report()` what it chose.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor={floor} is outside 0 … 1, the share of the gradient that must be kept")
    if not late >= 0.0:
        raise ValueError(f"late={late} is negative, the steps' worth of gradient that may wait in memory")
    standing = partial(standing_of, target=target, floor=floor, late=late)
    again = partial(auto, target, floor, late)
    return measured_for(
        Decision(
            lambda facts: chosen_by(facts, standing(facts), again),
            whole_steps=True,
            candidates=("dense", *(text for text, steps in CANDIDATES.items() if steps <= late)),
            foreseen=tuple(text for text, steps in CANDIDATES.items() if steps > late),
            examine=lambda facts: shortlist(standing(facts), [tuple(family) for family in FAMILIES]),
            resume=lambda composition: watched(composition, again),
        )
    )


def standing_of(facts: Facts, target: float, floor: float, late: float) -> Standing:
    """The options that follow from `facts`; `facts.dense_s` must be known.

    All forecast recipes within the limit `late`, or those of them that were measured once any was to be.
    """
    assert facts.dense_s is not None, "asked for by `whole_steps`"
    before_s = 0.0 if facts.backward is None else facts.backward.before_s
    measured = {} if facts.fidelity is None else facts.fidelity
    options = [
        Option.of(text, facts.recut.get(text, text), found, CANDIDATES[text], measured.get(text))
        for text, found in facts.forecasts.items()
        if text != "dense"
    ]
    within = [each for each in options if each.late <= late]
    if facts.fidelity is not None:
        within = [each for each in within if each.fidelity is not None]
    dense_bytes = 2 * (facts.world - 1) / facts.world * facts.gradient_bytes
    predicted = facts.forecasts.get("dense")
    return Standing(
        tuple(within),
        before_s,
        facts.backward_s,
        facts.dense_s,
        dense_bytes,
        None if predicted is None else predicted.step_s() - before_s,
        margin_of(facts.dense_noise, COUNTED),
        target,
        floor,
        facts.dense_noise,
        later=tuple(each for each in options if each.late > late),
    )


def chosen_by(facts: Facts, standing: Standing, again: Again) -> Composition:
    """The best option, on trial; dense if none is predicted to beat it. `again` makes the next decision."""
    best = standing.best()
    times = f"all-reduce {_ms(facts.allreduce_s)}, backward {_ms(facts.backward_s)}"
    measured = f"CCR {facts.ccr:.2f} ({times})"
    if best is not None:
        tried = on_trial(best.recipe, standing, again, left=DECIDED - facts.steps)
        return replace(tried, why=f"{measured}; {tried.why}")
    dense_s = standing.dense_s
    if standing.dense_hides:
        why = f"communication hides as it is: {standing.share_of_linear(dense_s):.0%} of linear"
    else:
        unknown = facts.fidelity is not None and not facts.fidelity
        fast = f"is predicted to be faster than the {_ms(standing.before_s + dense_s)} of dense"
        why = f"no recipe that may run {'could be measured' if unknown else fast}"
        why += standing.missed(dense_s) + standing.offer()
    return watched(replace(dense(), why=f"{measured}: {why}", table=standing.table("dense")), again)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
