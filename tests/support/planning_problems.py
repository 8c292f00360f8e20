"""Random planning problems, and every way to group a few tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, combinations
from random import Random

from gradwire.planning.costs import Backward, Line
from gradwire.planning.cuts import Cuts
from gradwire.planning.merge import GroupCost
from gradwire.planning.ratio import Candidate, Evaluate


def backward(draw: Random, tensors: int) -> Backward:
    """Tensors of 10 to 10^5 elements, ready one after another within a second or so."""
    numel = tuple(int(10 ** draw.uniform(1, 5)) for _ in range(tensors))
    times = [draw.choice((0.0, draw.random(), draw.random())) for _ in range(tensors)]
    ready = tuple(at / max(tensors / 2, 1) for at in accumulate(times))
    return Backward(0.0, ready, numel, (ready[-1] if ready else 0.0) + draw.choice((0.0, 0.1)))


def _line(draw: Random, base: float, slope: float) -> Line:
    return Line(draw.choice((0.0, draw.uniform(0, base))), draw.choice((0.0, draw.uniform(0, slope))))


def cost(draw: Random, of: Backward, decode: bool = True) -> GroupCost:
    """Costs at which all three, the backward pass and latencies compete."""
    total = max(sum(of.numel), 1)
    decoding = _line(draw, 0.1, 1 / total) if decode else Line(0.0, 0.0)
    return GroupCost(_line(draw, 0.1, 1 / total), _line(draw, 0.1, 2 / total), decoding)


def all_groupings(tensors: int, most: int | None = None) -> Iterator[Cuts]:
    """Every grouping of so many tensors, of at most `most` groups."""
    for cuts in range(min(tensors, most or tensors)):
        yield from combinations(range(1, tensors), cuts)


def typical(beta_s: float, lost: float = 0.01) -> Evaluate:
    """Objectives of ratios on a link that needs `beta_s` for everything."""

    def evaluate(ratio: float) -> Candidate:
        gain = 1 - 0.9 * math.exp(-math.sqrt(ratio / lost))
        return Candidate(ratio, 0.010 + 0.02 * ratio, 0.002 + beta_s * ratio, gain)

    return evaluate
