"""Where to cut a lane into units."""

from __future__ import annotations


def even_cuts(numel: int, unit_elements: int) -> tuple[int, ...]:
    """Inner cut points of equal units of at most `unit_elements` elements.

    >>> even_cuts(10, 4)
    (3, 6)
    """
    parts = max(1, -(-numel // unit_elements))
    return tuple(numel * part // parts for part in range(1, parts))


def sized_cuts(numel: int) -> tuple[int, ...]:
    """Cuts for an exchange that overlaps with backward: about eight units, of 1 to 25 MB of float32.

    The last unit is ready only when backward ends, so its transmission shows; smaller units shorten
    that tail, but each costs the latency of its rounds.
    """
    return even_cuts(numel, min(max(numel // 8 + 1, 1 << 18), 25 << 18))


def phased_cuts(numel: int, interval: int, per_phase: int = 16, smallest: int = 1 << 14) -> tuple[int, ...]:
    """Cuts for an interval: every phase gets equally many equal units, spread over the whole backward.

    Unit t belongs to phase (-t) mod I, so consecutive units go to different phases and each phase has
    one unit in every I-th of the arena. Units are not cut below `smallest` elements.

    >>> phased_cuts(24, interval=3, per_phase=2, smallest=1)
    (4, 8, 12, 16, 20)
    """
    rounds = min(per_phase, max(1, numel // (interval * smallest)))
    parts = interval * rounds
    return tuple(numel * part // parts for part in range(1, parts))
