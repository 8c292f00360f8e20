"""Random planning problems, every way to group a few tensors, and what searches are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from random import Random

import numpy as np

from gradwire.planning.boundaries import Boundaries, phased_boundaries
from gradwire.planning.collectives import Transfer, time_of
from gradwire.planning.costs import FREE, BackwardTiming, CodecCost, Line, Network
from gradwire.planning.interval import balanced_edges
from gradwire.planning.merge import GroupCost, seconds_of
from gradwire.planning.ratio import (
    HIGHEST,
    LOWEST,
    Evaluate,
    RatioCandidate,
    candidate_ratios,
    knee,
    pareto_front,
)
from gradwire.planning.step_time import Sent, UnitWork, ready_of_element


def units_between(
    of: BackwardTiming,
    boundaries: Sequence[int],
    rounds: Callable[[int, int], tuple[Transfer, ...]],
    world: int,
    network: Network,
) -> list[UnitWork]:
    """The units between element cuts, for `step_time`: `rounds(index, numel)` names a unit's collectives."""
    ready_s, bounds, found = ready_of_element(of), pairwise((0, *boundaries, sum(of.numel))), []
    for index, (start, stop) in enumerate(bounds):
        sent = tuple(Sent(time_of(each, world, network)) for each in rounds(index, stop - start))
        found.append(UnitWork(ready_s(stop), stop - start, sent))
    return found


def step_seconds(of: BackwardTiming, boundaries: Boundaries, cost: GroupCost) -> float:
    """MergeComp's F of a grouping, by the model."""
    return seconds_of(of, cost, beside=False)(boundaries)


def step_held_up_s(units: Sequence[UnitWork], backward_s: float, codec: CodecCost = FREE) -> float:
    """A step in which the codec holds up the backward pass itself, and units are decoded at its end.

    COVAP's equation 6 (Meng et al. 2023), and MergeComp's F (Wang et al. 2021, equation 7) where what
    encoding is said to take includes decoding.
    """
    held_s, wire_free_s, ends = 0.0, 0.0, []
    for unit in units:
        [sent] = unit.sent
        held_s += codec.encode(unit.numel)
        wire_free_s = max(unit.ready_s + held_s, wire_free_s) + sent.seconds
        ends.append(wire_free_s)
    free_s = backward_s + held_s
    for unit, end_s in zip(units, ends, strict=True):
        free_s = max(end_s, free_s) + codec.decode(unit.numel)
    return free_s


def backward(draw: Random, tensors: int) -> BackwardTiming:
    """Tensors of 10 to 10^5 elements, ready one after another within a second or so."""
    numel = tuple(int(10 ** draw.uniform(1, 5)) for _ in range(tensors))
    times = [draw.choice((0.0, draw.random(), draw.random())) for _ in range(tensors)]
    ready = tuple(at / max(tensors / 2, 1) for at in accumulate(times))
    return BackwardTiming(0.0, ready, numel, (ready[-1] if ready else 0.0) + draw.choice((0.0, 0.1)))


def _line(draw: Random, base: float, slope: float) -> Line:
    return Line(draw.choice((0.0, draw.uniform(0, base))), draw.choice((0.0, draw.uniform(0, slope))))


def cost(draw: Random, of: BackwardTiming) -> GroupCost:
    """Costs at which all three, the backward pass and latencies compete."""
    total = max(sum(of.numel), 1)
    decoding = _line(draw, 0.1, 1 / total)
    return GroupCost(_line(draw, 0.1, 1 / total), _line(draw, 0.1, 2 / total), decoding)


def all_groupings(tensors: int, most: int | None = None) -> Iterator[Boundaries]:
    """Every grouping of `tensors` tensors, of at most `most` groups."""
    for boundaries in range(min(tensors, most or tensors)):
        yield from combinations(range(1, tensors), boundaries)


def typical(beta_s: float, lost: float = 0.01) -> Evaluate:
    """Objectives of ratios on a link that needs `beta_s` for everything."""

    def evaluate(ratio: float) -> RatioCandidate:
        gain = 1 - 0.9 * math.exp(-math.sqrt(ratio / lost))
        return RatioCandidate(ratio, 0.010 + 0.02 * ratio, 0.002 + beta_s * ratio, gain)

    return evaluate


def groups_of(boundaries: Boundaries, tensors: int) -> list[tuple[int, int]]:
    """The tensors [first, stop) of every group."""
    return list(pairwise((0, *boundaries, tensors)))


def fine_ratios(low: float = LOWEST, high: float = HIGHEST, number: int = 101) -> tuple[float, ...]:
    """`number` ratios at equal distances on a logarithmic scale, the largest first."""
    return tuple(float(ratio) for ratio in np.geomspace(high, low, number))


def best_ratio(evaluate: Evaluate, ratios: Sequence[float] | None = None) -> RatioCandidate:
    """The exact sweep: evaluate every ratio, by default the paper's five; the knee of their front."""
    return knee(pareto_front([evaluate(ratio) for ratio in ratios or candidate_ratios()]))


def balanced_boundaries(of: BackwardTiming, interval: int, wire: Line) -> Boundaries:
    """The cuts of `covap(sharding='balanced')` where ready times and links have been measured."""
    return phased_boundaries(of.numel, interval, balanced_edges(of, interval, wire))


def step_traffic(units: Sequence[int], interval: int) -> tuple[int, ...]:
    """Elements that each step of an interval carries: unit t travels in step s iff (t + s) mod I = 0."""
    sums = [0] * interval
    for index, numel in enumerate(units):
        sums[-index % interval] += numel
    return tuple(sums)


def imbalance(units: Sequence[int], interval: int) -> float:
    """The busiest step's traffic over the mean; 1 is perfect."""
    traffic = step_traffic(units, interval)
    return max(traffic) * interval / max(sum(traffic), 1)
