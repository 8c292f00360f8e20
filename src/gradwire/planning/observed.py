"""What a watched step has shown, agreed by all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.planning.costs import Link


@dataclass(frozen=True)
class Watched:
    """So many ranks, and the elements of the parameters in the main recipe's lane, in order."""

    world: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Observed:
    """Of one verdict: `step` that has been judged, and whether it was committed.

    `previous_s` is how long the step before took from the start of backward to its verdict, `compressed_s`
    what of that went into encoding and decoding, each on the slowest rank; 0 when there was none under this
    plan. `looked` are sums over units and ranks; `None` in steps that did not look. `link` is the line
    through what steps' own collectives took under this plan, as `gradwire.measure.traffic` draws it; `None`
    in the first 15 of them.
    """

    step: int
    previous_s: float
    compressed_s: float
    looked: tuple[float, ...] | None = None
    link: Link | None = None
