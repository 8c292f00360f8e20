"""Where to cut a lane into units."""

from __future__ import annotations

from itertools import pairwise


def even_cuts(numel: int, unit_elements: int) -> tuple[int, ...]:
    """Inner cut points of equal units of at most `unit_elements` elements.

    >>> even_cuts(10, 4)
    (3, 6)
    """
    parts = max(1, -(-numel // unit_elements))
    return tuple(numel * part // parts for part in range(1, parts))


_EDGES = (2, 7, 12, 15)  # sixteenths of the arena


def ramped_cuts(numel: int, largest: int = 25 << 18, smallest: int = 1 << 14) -> tuple[int, ...]:
    """Cuts for an exchange that overlaps with backward: small at both ends, large in between.

    The wire idles until the first unit is ready, and what is ready last cannot hide behind anything, so
    both are small; every unit costs the latency of its rounds, so the others are few. In sixteenths of
    the arena: 2, 5, 5, 3, 1. Units above `largest` elements (25 MB of float32) are divided until they
    fit; a lane too small for units of `smallest` elements is halved at most.

    >>> ramped_cuts(1600, largest=300, smallest=100)
    (200, 450, 700, 950, 1200, 1500)
    """
    if numel < 16 * smallest:
        return even_cuts(numel, max(numel // 2 + 1, smallest))
    bounds = [0, *(numel * edge // 16 for edge in _EDGES), numel]
    cuts: list[int] = []
    for start, stop in pairwise(bounds):
        cuts += [start + cut for cut in even_cuts(stop - start, largest)]
        cuts.append(stop)
    return tuple(cuts[:-1])


def phased_cuts(numel: int, interval: int, per_phase: int = 16, smallest: int = 1 << 14) -> tuple[int, ...]:
    """Cuts for an interval: every phase gets equally many equal units, spread over the whole backward.

    Unit t belongs to phase (-t) mod I, so consecutive units go to different phases and each phase has
    one unit in every I-th of the arena. Units are not cut below `smallest` elements unless the interval
    alone asks for it.

    >>> phased_cuts(24, interval=3, per_phase=2, smallest=1)
    (4, 8, 12, 16, 20)
    """
    rounds = min(per_phase, max(1, numel // (interval * smallest)))
    parts = min(interval * rounds, max(1, numel))
    return tuple(numel * part // parts for part in range(1, parts))
