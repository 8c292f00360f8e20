"""Where to cut a lane into units."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def even_cuts(numel: int, unit_elements: int) -> tuple[int, ...]:
    """Inner cut points of equal units of at most `unit_elements` elements.

    >>> even_cuts(10, 4)
    (3, 6)
    """
    parts = max(1, -(-numel // unit_elements))
    return tuple(numel * part // parts for part in range(1, parts))


_RAMP = (2, 8, 13, 15)  # sixteenths of the arena
PHASED_RAMP = (2 / 16, 6 / 16, 10 / 16, 13 / 16, 15 / 16)


def ramped_cuts(numel: int, largest: int = 25 << 18, smallest: int = 1 << 12) -> tuple[int, ...]:
    """Cuts for an exchange that overlaps with backward: small at both ends, large in between.

    The wire idles until the first unit is ready, and what is ready last cannot hide behind anything, so
    both are small; every round costs a latency and CPU time, so there are few. In sixteenths of the arena:
    2, 6, 5, 2, 1. Units above `largest` elements (25 MB of float32) are divided until they fit; a lane too
    small for units of `smallest` elements is halved at most.

    >>> ramped_cuts(1600, largest=500, smallest=100)
    (200, 500, 800, 1300, 1500)
    """
    if numel < 16 * smallest:
        return even_cuts(numel, max(numel // 2 + 1, smallest))
    cuts: list[int] = []
    for start, stop in _segments(numel, _RAMP):
        cuts += [start + cut for cut in even_cuts(stop - start, largest)]
        cuts.append(stop)
    return tuple(cuts[:-1])


def phased_cuts(numel: int, interval: int, edges: Sequence[float] = PHASED_RAMP) -> tuple[int, ...]:
    """Cuts for an interval: every phase gets one unit of each segment, spread over the backward.

    Unit t belongs to phase (-t) mod I, and each segment is divided into I equal units, so all phases carry
    the same bytes. Segments end at the shares `edges` of all elements; where nobody knows better they are 2,
    4, 4, 3, 2 and 1 sixteenths: small where nothing is left to hide behind.

    >>> phased_cuts(320, interval=2)
    (20, 40, 80, 120, 160, 200, 230, 260, 280, 300, 310)
    >>> phased_cuts(320, interval=2, edges=(0.75,))
    (120, 240, 280)
    """
    ends = [0, *(int(numel * edge) for edge in edges), numel]
    bounds = [
        start + (stop - start) * part // interval
        for start, stop in pairwise(ends)
        for part in range(1, interval + 1)
    ]
    return tuple(bounds[:-1])


def _segments(numel: int, ramp: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise([0, *(numel * edge // 16 for edge in ramp), numel]))
