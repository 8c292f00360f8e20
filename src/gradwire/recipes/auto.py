"""auto: of the recipes that hide their communication, run the one that keeps most of the gradient.

First, dense steps are timed as a whole, then in parts. The cost model predicts a step of every candidate. The
promising candidates run on recorded gradients of all ranks, beside further dense steps. That shows what their
codecs cost and how much of the gradient they keep (`gradwire.engine.examining`). The choice among them is a
pure function of numbers that all ranks have agreed on (`gradwire.decide.choice`), and what is chosen runs on
trial first (`gradwire.recipes.trial`).
"""

from dataclasses import replace
from functools import partial

from gradwire.decide.choice import Option, Standing, margin_of, shortlist
from gradwire.planning.facts import Facts
from gradwire.recipes.base import Composition, Decision, register
from gradwire.recipes.dense import dense, measured_for
from gradwire.recipes.trial import COUNTED, DECIDED, Again, on_trial, watched

FAMILIES: tuple[dict[str, float], ...] = (
    {"gcomp": 1.0},
    {"fp16": 0.9997, "bf16": 0.998},
    {"int8": 0.998, "int4": 0.965},
    {"int8(collective='all_gather')": 0.998, "int4(collective='all_gather')": 0.965},
    {
        "topk(ratio=0.1, values='fp16')": 0.90,
        "topk(ratio=0.03, values='fp16')": 0.78,
        "topk(ratio=0.01, values='fp16')": 0.66,
        "topk(ratio=0.003, values='fp16')": 0.50,
        "topk(ratio=0.001, values='fp16')": 0.36,
    },
    {
        "leader_topk(ratio=0.1, values='fp16')": 0.85,
        "leader_topk(ratio=0.03, values='fp16')": 0.71,
        "leader_topk(ratio=0.01, values='fp16')": 0.57,
        "leader_topk(ratio=0.003, values='fp16')": 0.40,
        "leader_topk(ratio=0.001, values='fp16')": 0.24,
    },
    {"powersgd(rank=8)": 0.92, "powersgd(rank=4)": 0.86, "powersgd(rank=2)": 0.77, "powersgd(rank=1)": 0.62},
    {"acpsgd(rank=8)": 0.82, "acpsgd(rank=4)": 0.77, "acpsgd(rank=2)": 0.67, "acpsgd(rank=1)": 0.54},
    {"covap(interval=2)": 0.74, "covap(interval=3)": 0.6, "covap(interval=4)": 0.5},
    {"efsignsgd": 0.62},
)
"""Methods from mild to strong, each recipe with the share that it kept of one model's gradients over twelve
steps (`docs/choosing.md`). That share stands for what could not be measured."""

CANDIDATES = {text: kept for family in FAMILIES for text, kept in family.items()}

FLOOR = 0.5
"""A recipe that keeps a smaller share of the gradient is not taken for its speed."""


@register
def auto(target: float = 0.95, floor: float = FLOOR) -> Composition:
    """Measure, predict every recipe, and run the one that keeps most among those that hide communication.

    `target` is the speed to reach, as a share of that without communication. If no recipe is predicted to
    reach it, the fastest that keeps at least `floor` of the gradient runs.

    Travels: what the choice sends; dense while it measures.
    Paper: COVAP's criterion (Meng et al. 2023, section III-C) as the rule for all.
    Use when: first of all, and read in `wire.report()` what it chose.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor={floor} is outside 0 … 1, the share of the gradient that must be kept")
    standing, again = partial(standing_of, target=target, floor=floor), partial(auto, target, floor)
    return measured_for(
        Decision(
            lambda facts: chosen_by(facts, standing(facts), again),
            whole_steps=True,
            candidates=("dense", *CANDIDATES),
            examine=lambda facts: shortlist(standing(facts), [tuple(family) for family in FAMILIES]),
            resume=lambda composition: watched(composition, again),
        )
    )


def standing_of(facts: Facts, target: float, floor: float) -> Standing:
    """The options that follow from `facts` for all forecast recipes; `facts.dense_s` must be known."""
    assert facts.dense_s is not None, "asked for by `whole_steps`"
    before_s = 0.0 if facts.backward is None else facts.backward.before_s
    options = [
        Option.of(text, facts.recut.get(text, text), found, facts.fidelity.get(text, CANDIDATES[text]))
        for text, found in facts.forecasts.items()
        if text != "dense"
    ]
    dense_bytes = 2 * (facts.world - 1) / facts.world * facts.gradient_bytes
    predicted = facts.forecasts.get("dense")
    return Standing(
        tuple(options),
        before_s,
        facts.backward_s,
        facts.dense_s,
        dense_bytes,
        None if predicted is None else predicted.step_s() - before_s,
        margin_of(facts.dense_noise, COUNTED),
        target,
        floor,
        facts.dense_noise,
    )


def chosen_by(facts: Facts, standing: Standing, again: Again) -> Composition:
    """The best option, on trial; dense if none is predicted to beat it. `again` makes the next decision."""
    best = standing.best()
    times = f"all-reduce {_ms(facts.allreduce_s)}, backward {_ms(facts.backward_s)}"
    measured = f"CCR {facts.ccr:.2f} ({times})"
    if best is not None:
        tried = on_trial(best.recipe, standing, again, left=DECIDED - facts.steps)
        return replace(tried, why=f"{measured}; {tried.why}")
    if standing.dense_hides:
        why = f"communication hides as it is: {standing.share_of_linear(standing.dense_s):.0%} of linear"
    else:
        why = (
            f"nothing is predicted to be faster than the {_ms(standing.before_s + standing.dense_s)} of dense"
            + standing.missed(standing.dense_s)
        )
    return watched(replace(dense(), why=f"{measured}: {why}", table=standing.table("dense")), again)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
