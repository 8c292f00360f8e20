"""mergecomp: any recipe, with planned boundaries.

Wang et al. 2021, "MergeComp: A Compression Scheduler for Scalable Communication-Efficient Distributed
Training". Differences from the paper: by default, the boundaries are optimal for a codec that runs beside the
backward pass, as the reducer's does (`gradwire.planning.merge_worker`). Beside a training, on shared cores
with cold caches, a group costs more than its codec costs alone, by an unknown factor. So real steps decide
between this plan, one for more expensive calls, and one group. In the paper's own cost model, encoding and
decoding hold up the backward pass (`gradwire.planning.merge`). `split="exact"` is the optimum of that model,
`split="search"` the paper's search on it, and `split="timed"` that search on timed iterations, whose number
it announces. Vectors and tiny tensors are sent densely beside the groups, unless a policy says otherwise. A
codec's scales belong to parameters as in its own recipe, which makes them independent of the groups; with
`scales="group"` a group is compressed as one tensor, as in the paper's algorithm 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from gradwire.exchange.base import Exchange, steady_rounds
from gradwire.exchange.compose import forget, merged
from gradwire.planning.boundaries import (
    Boundaries,
    element_boundaries,
    even_groups,
    fixed_boundaries,
    layer_boundaries,
    one_unit,
)
from gradwire.planning.collectives import total_time
from gradwire.planning.costs import BackwardTiming, Line, Network
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.planning.merge import GroupCost, optimal_boundaries, search_boundaries, seconds_of
from gradwire.planning.merge_worker import moved_boundaries, worker_boundaries
from gradwire.planning.timed_merge import LEAST_STEPS, MOST_STEPS, TimedMerge, contest, timed_search
from gradwire.quantities import counted
from gradwire.recipes.base import Composition, Decision, Judge, Watch, register
from gradwire.recipes.dense import measured_for
from gradwire.recipes.parse import recipe, steady

_LOG = logging.getLogger("gradwire")

Split = Literal["planned", "exact", "search", "timed", "even", "layers"]
Scales = Literal["parameter", "group"]
SCALED = ("efsignsgd", "onebit", "qsgd", "signsgd", "signum", "terngrad")
"""Recipes whose codes have scales that may belong to a group, and that need no names or shapes."""


@register
def mergecomp(
    inner: str = "topk",
    split: Split = "planned",
    groups: int = 2,
    cuts: tuple[int, ...] | None = None,
    elements: int = 0,
    alpha: float = 0.0,
    steps: int = MOST_STEPS,
    *,
    scales: Scales = "parameter",
) -> Composition:
    """Any recipe in groups of tensors: fewer calls of a codec, and still overlap with backward.

    By default the boundaries are found within some 30 steps, five of them dense, and then stay. A run that
    resumes from an earlier checkpoint stays with one group. `split="timed"` takes at most `steps` steps, and
    keeps the fastest grouping that it has timed. If they are too few to count three steps of each, fewer
    count; if they are too few for one, as for three groups of many tensors, neighbouring tensors stay
    together. The paper's search (`"search"`, `"timed"`) stops when one more group gains less than the share
    `alpha`. No value is published; 0, the default, is outside the paper's range (0, 1), and never stops for a
    small gain.

    Boundaries are chosen by time alone. They may change the loss as well, because a selector chooses within
    each group; so a decision may trade loss for time (figures in `docs/recipes.md`).

    Travels: what the inner recipe sends.
    Paper: Wang et al. 2021, "MergeComp: a compression scheduler for scalable communication-efficient
        distributed training".
    Use when: a codec's fixed cost per call shows, or you want to see what cutting otherwise would change.

    Args:
        inner: the recipe that runs in each group.
        split: "planned", "exact" and "search" compute boundaries from measured costs, "timed" times
            groupings, and "layers" and "even" are fixed.
        groups: the number of groups of "even", and the most that "search" and "timed" try.
        cuts: boundaries in elements, which were found before; `None` finds them.
        elements: elements of the flat buffer for which `cuts` were found.
        alpha: the share that one more group must gain.
        steps: the most steps of "timed".
        scales: "group" compresses a group as one tensor, as the paper does: fewer and coarser scales, so
            groups change the numbers. For efsignsgd, onebit, qsgd, signsgd, signum and terngrad.
    """
    base = _inner(inner, scales)
    if split not in get_args(Split):
        raise ValueError(f"split={split!r} is none of {', '.join(get_args(Split))}")
    if groups < 1:
        raise ValueError(f"groups={groups} must be at least one")
    if alpha < 0.0:
        raise ValueError(f"alpha={alpha} must be at least 0: a share, such as 0.01")
    if steps < LEAST_STEPS:
        raise ValueError(f"steps={steps} is too few: timing one group and two takes {LEAST_STEPS}")
    if elements < 0:
        raise ValueError(f"elements={elements} must not be negative")
    if cuts and elements < 1:
        raise ValueError("cuts need elements=, the number of elements for which they were made")
    asked = partial(mergecomp, inner, split, groups, alpha=alpha, steps=steps, scales=scales)
    if cuts is not None:
        return _cut(base, partial(fixed_boundaries, boundaries=cuts, numel=elements))
    if split == "layers":
        return _cut(base, layer_boundaries)
    if split == "even":
        return _cut(base, partial(_even, groups=groups))
    if split == "timed":
        return replace(
            _cut(base, one_unit),
            watch=Watch(partial(_timed, asked, groups, alpha, steps), every=1, ends=True),
            why=f"timing groupings for at most {steps} steps",
        )
    return measured_for(Decision(partial(_planned, asked, inner, split, groups, alpha, scales), about=base))


def _inner(text: str, scales: Scales) -> Composition:
    composition = steady(text, "inner")
    if composition.exchange.memory is None:
        # Such a recipe sends DDP's own buckets as they are. In a flat buffer, gradients can be grouped
        # otherwise.
        composition = replace(composition, exchange=forget(composition.exchange))
    if scales not in get_args(Scales):
        raise ValueError(f"scales={scales!r} is none of {', '.join(get_args(Scales))}")
    if scales == "parameter":
        return composition
    if recipe(text).name not in SCALED:
        raise ValueError(
            f"scales='group' is for inner={', '.join(SCALED)}; inner={text!r} has no such scales"
        )
    return replace(composition, exchange=merged(composition.exchange))


def _cut(base: Composition, cutter: Callable[[Sequence[int]], Sequence[int]]) -> Composition:
    return Composition(base.exchange, cutter, tiny=base.tiny, alone=base.alone)


def _even(sizes: Sequence[int], groups: int) -> tuple[int, ...]:
    """Boundaries, in elements, of `groups` groups with equally many tensors each, for tensors of `sizes`
    elements: the paper's naive split.
    """
    return element_boundaries(even_groups(len(sizes), groups), sizes)


Asked = Callable[..., Composition]
"""`mergecomp` with the options that were asked for, to which `cuts` and `elements` are added."""


def _fixed(asked: Asked, watched: Watched, boundaries: Sequence[int], why: str) -> Composition:
    found = asked(cuts=element_boundaries(tuple(boundaries), watched.sizes), elements=sum(watched.sizes))
    return replace(found, why=why)


def _told(boundaries: Sequence[int]) -> str:
    return counted(len(boundaries) + 1, "group")


def _timed(asked: Asked, groups: int, alpha: float, steps: int, watched: Watched) -> Judge:
    """Judge that searches groupings of the `watched` flat buffer by the paper's algorithm 2, with the
    measured times of training steps. `asked` makes the recipe with given boundaries; the other arguments
    are those of `mergecomp`.
    """
    return _trying(timed_search(len(watched.sizes), groups, alpha, steps), asked(), asked, watched)


def _trying(search: TimedMerge, trying: Composition, asked: Asked, watched: Watched) -> Judge:
    """Judge that runs one grouping after the other, as `search` asks for them, and then the fastest.

    Args:
        search: proposes groupings, and observes the times of steps.
        trying: the composition on trial; its boundaries are replaced, its text stays.
        asked: makes the composition with the final boundaries.
        watched: elements of the tensors to group.
    """
    takes = f"{search.most_steps} steps at most"
    if search.stride > 1:
        takes += f", in which {search.stride} neighbouring tensors stay together"
    _LOG.info("mergecomp times groupings of %d tensors: %s", len(watched.sizes), takes)

    def judge(shown: StepObservation) -> Composition | None:
        trial = search.observe(shown)
        if trial is None:
            return None
        if trial.is_last:
            return _fixed(asked, watched, trial.boundaries, f"fastest when timed: {_told(trial.boundaries)}")
        found = element_boundaries(trial.boundaries, watched.sizes)
        return replace(
            trying,
            cutter=partial(fixed_boundaries, boundaries=found, numel=sum(watched.sizes)),
            watch=Watch(lambda _watched: judge, every=1, ends=True),
            why=f"timing {_told(trial.boundaries)}; the search takes {takes}",
        )

    return judge


def _planned(
    asked: Asked, inner: str, split: Split, groups: int, alpha: float, scales: Scales, facts: Facts
) -> Composition:
    """Composition with boundaries planned from the measured `facts`. `asked` makes the recipe with given
    boundaries; the other arguments are those of `mergecomp`. The first steps are in one group, because a
    built flat buffer is needed to plan.

    Its text says one group until the decision, because a checkpoint may be saved before.
    """
    base, single = _inner(inner, scales), mergecomp(inner, split="even", groups=1, scales=scales)
    if facts.network is None or facts.codec is None:
        return replace(single, why="one group: neither a link nor the codec could be measured")

    def judge_of(watched: Watched) -> Judge:
        if len(watched.sizes) < 2:
            return lambda _shown: _fixed(asked, watched, (), "there is nothing to cut")
        backward, cost = ready_times(facts, watched.sizes), cost_of(base.exchange, facts, watched)
        boundaries, seconds = _best(split, groups, alpha, backward, cost)
        after_s = seconds - backward.total_s
        why = f"{_told(boundaries)}: {after_s * 1e3:.1f} ms are left after backward, by the measured costs"
        rivals: tuple[Boundaries, ...] = (boundaries,)
        if split == "planned":
            rivals = tuple(
                dict.fromkeys(((), moved_boundaries(backward, dearer(cost), boundaries), boundaries))
            )
        if len(rivals) == 1:
            return lambda _shown: _fixed(asked, watched, boundaries, why)
        return _trying(contest(rivals), single, asked, watched)

    return replace(single, watch=Watch(judge_of, every=1, ends=True), why="timing one group")


def _best(
    split: Split, groups: int, alpha: float, backward: BackwardTiming, cost: GroupCost
) -> tuple[Boundaries, float]:
    """Boundaries for tensors that become ready as in `backward`, in groups of this `cost`, and the seconds of
    a backward pass under the model of `split`, of which they are the best.
    """
    seconds = seconds_of(backward, cost, beside=split == "planned")
    if split == "planned":
        boundaries = worker_boundaries(backward, cost)
    elif split == "search":
        boundaries = search_boundaries(seconds, len(backward.numel), groups, alpha)
    else:
        boundaries = optimal_boundaries(backward, cost)
    return boundaries, seconds(boundaries)


def ready_times(facts: Facts, sizes: Sequence[int]) -> BackwardTiming:
    """Ready times of the parameters with `sizes` elements, a subset of all, in the same order."""
    every, ready_s, reached = facts.backward, [], 0.0
    if every is None:
        raise ValueError("no ready times were measured")
    numel = list(every.numel)
    at = 0
    for size in sizes:
        at = numel.index(size, at) + 1
        # A group is sent in order, so a tensor is ready when all before it are.
        reached = max(reached, every.ready_s[at - 1])
        ready_s.append(reached)
    return BackwardTiming(every.before_s, tuple(ready_s), tuple(sizes), every.total_s)


def cost_of(exchange: Exchange, facts: Facts, watched: Watched) -> GroupCost:
    """Measured costs of a group, in seconds, as lines over its elements: encoding, sending, and decoding of
    all payloads.

    Args:
        exchange: announces the collectives of a unit.
        facts: measured links, codec and number of payloads; they must be known.
        watched: the flat buffer and the number of ranks.
    """
    assert facts.network is not None, "links are measured first"
    assert facts.codec is not None, "so is the codec"
    decode, payloads = facts.codec.decode, facts.payloads
    return GroupCost(
        facts.codec.encode,
        sending(exchange, facts.network, watched.world),
        Line(decode.base_s * payloads, decode.slope_s * payloads),
    )


DEARER = 10.0
"""Factor by which a call of a codec may cost more beside a training than alone. Measured for a network of 0.2
M elements whose two ranks fill two cores (1.24 ms per group against 0.13); less if cores are free."""


def dearer(cost: GroupCost) -> GroupCost:
    """`cost` with `DEARER` times the cost of a call, and the same cost of an element."""
    encode, decode = (replace(line, base_s=DEARER * line.base_s) for line in (cost.encode, cost.decode))
    return GroupCost(encode, cost.communicate, decode)


def sending(exchange: Exchange, network: Network, world: int) -> Line:
    """Seconds of sending a group with `exchange` among `world` ranks, as a line over the group's elements.

    The line goes through the predicted times of the exchange for a group of 2^12 and one of 2^22 elements.
    Neither its base nor its slope is negative.
    """
    small, large = (_seconds(exchange, numel, network, world) for numel in _ENDS)
    slope_s = max(large - small, 0.0) / (_ENDS[1] - _ENDS[0])
    return Line(max(small - slope_s * _ENDS[0], 0.0), slope_s)


_ENDS = (1 << 12, 1 << 22)


def _seconds(exchange: Exchange, numel: int, network: Network, world: int) -> float:
    return total_time(steady_rounds(exchange, numel, world), world, network)
