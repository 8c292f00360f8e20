"""COVAP's interval I, and segments by which all steps carry equal bytes.

The interval follows from the communication-to-computation ratio (Meng et al. 2023, section III-B). There are
two ways to cut. `paper_boundaries` is the paper's tensor sharding (section III-C): units of 25 MB, and units
of at least twice the median cut evenly into at most I parts. `balanced_edges` places segments freely, for the
shortest step by the ready times. `phased_boundaries` (`planning.boundaries`) then divides each segment into I
equal units, so that all steps carry equal bytes.

Differences from the paper: its worked example takes 5590260 for the median of VGG-19's six units, but the
median is 7374592. (5590260 is the median of the four units that are not cut.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from gradwire.planning.boundaries import even_boundaries
from gradwire.planning.costs import BackwardTiming, Line
from gradwire.planning.merge import GroupCost, optimal_boundaries
from gradwire.planning.step_time import CALL_S, ready_of_element


def interval_for(ccr: float, decimals: int = 1) -> int:
    """I = ⌈CCR⌉ after rounding to `decimals`, at least 1.

    Rounding first is how the paper's own table comes out: VGG-19's 842/210 = 4.01 was run at 4.

    >>> [interval_for(ccr) for ccr in (2.07, 3.06, 3.5, 4.01, 0.3)]
    [3, 4, 4, 4, 1]
    """
    return max(1, math.ceil(round(ccr, decimals)))


UNIT = 25 << 18
"""25 MB of float32, in elements: the paper's unit, and DDP's bucket."""
FIRST_UNIT = 1 << 18
"""1 MB: DDP's first bucket."""


def bucketed(numel: Sequence[int], unit: int = UNIT, first: int = FIRST_UNIT) -> tuple[int, ...]:
    """Elements of the paper's units: tensors in ready order, a unit closed once it holds `unit` or more.

    No tensor is divided, so a unit can be much larger. The first one is closed at `first`, as DDP does it.

    >>> bucketed([3, 3, 9, 1], unit=5, first=1)
    (3, 12, 1)
    """
    units = [0]
    for tensor in numel:
        if units[-1] >= (unit if len(units) > 1 else min(first, unit)):
            units.append(0)
        units[-1] += tensor
    return tuple(units)


def shards(units: Sequence[int], interval: int) -> tuple[int, ...]:
    """Into how many parts each unit is cut: ⌊numel / median⌋, at least 1 and at most the interval.

    >>> shards((4101096, 16781312, 107480576, 7079424, 7669760, 555072), interval=4)
    (1, 2, 4, 1, 1, 1)
    """
    middle = median(units) if units else 1
    return tuple(max(1, min(interval, int(numel // middle) if middle else 1)) for numel in units)


def paper_boundaries(
    numel: Sequence[int], interval: int, unit: int = UNIT, first: int = FIRST_UNIT
) -> tuple[int, ...]:
    """Inner boundaries in elements by the paper's rule, for tensors of `numel` elements in ready order.

    Args:
        numel: elements of each tensor.
        interval: I, the most parts into which a unit is divided.
        unit: elements at which a unit is full.
        first: the same for the first unit.
    """
    units = bucketed(numel, unit, first)
    starts = accumulate(units, initial=0)
    parts = shards(units, interval)
    bounds = [
        start + numel * part // number
        for start, numel, number in zip(starts, units, parts, strict=False)
        for part in range(1, number + 1)
    ]
    return tuple(bounds[:-1])


def balanced_edges(backward: BackwardTiming, interval: int, communicate: Line) -> tuple[float, ...]:
    """The ends of the best segments, as shares of all elements: the `edges` of `phased_boundaries`.

    All steps of the interval then carry as much, and each ends as early as possible. A unit costs the
    processor a call. `communicate` is the time of a unit of x elements on the wire.

    >>> balanced_edges(BackwardTiming(0.0, (1.0, 10.0), (60, 40), 10.0), 4, Line(0.1, 0.01))
    (0.6,)
    """
    edges = _segments(backward, interval, communicate)
    return tuple(round(edge / edges[-1], 4) for edge in edges[1:-1])


def _segments(backward: BackwardTiming, interval: int, communicate: Line) -> list[int]:
    """Offsets, in elements, at which segments begin and end, from 0 on.

    A step sends one unit of every segment, 1/I of it for the `interval` I, ready at the latest when the
    segment is. So the best segments are the best groups of tensors for a wire I times as fast. `communicate`
    are the seconds of a unit as a line over its elements. Each segment adds collectives, whose processor time
    delays the backward pass. Without that cost, the optimum would be one segment per piece if everything
    hides.
    """
    pieces = _divisible(backward, interval)
    wire = Line(communicate.base_s, communicate.slope_s / interval)
    segments = optimal_boundaries(pieces, GroupCost(Line(CALL_S, 0.0), wire))
    ends = list(accumulate(pieces.numel, initial=0))
    return [0, *(ends[boundary] for boundary in segments), ends[-1]]


def _divisible(backward: BackwardTiming, interval: int, most: int = 256) -> BackwardTiming:
    """Divide the elements of a backward pass into at most `most` equal pieces, each of at least `interval`
    elements, because segments need not end where tensors do.
    """
    total = sum(backward.numel)
    unit = max(interval, -(-total // most))
    ready_s = ready_of_element(backward)
    bounds = [0, *even_boundaries((total,), unit), total]
    return BackwardTiming(
        backward.before_s,
        tuple(ready_s(stop) for stop in bounds[1:]),
        tuple(stop - start for start, stop in pairwise(bounds)),
        backward.total_s,
    )
