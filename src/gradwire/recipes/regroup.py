"""Recipes with fewer boundaries than their own, for links on which a message costs more than its bytes."""

from __future__ import annotations

from gradwire.exchange.base import Exchange
from gradwire.planning.boundaries import Boundaries, coarse_boundaries
from gradwire.recipes.base import Composition
from gradwire.recipes.mergecomp import mergecomp


def fewer_boundaries(exchange: Exchange, numel: int, units: int) -> tuple[Boundaries, ...]:
    """Up to five sets of boundaries for fewer than `units` units of a flat buffer of `numel` elements.

    Empty if units take turns: their number is part of the recipe then.

    >>> from gradwire.recipes.parse import steady
    >>> [fewer_boundaries(steady(text, "inner").exchange, 160, 3) for text in ("int8", "covap(interval=4)")]
    [((80,), ()), ()]
    """
    if exchange.laws.cycle > 1:
        return ()
    return tuple(boundaries for boundaries in coarse_boundaries(numel) if len(boundaries) + 1 < units)


def with_boundaries(text: str, boundaries: Boundaries, numel: int) -> Composition:
    """The recipe `text` whose flat buffer of `numel` elements has these `boundaries`.

    >>> with_boundaries("int8", (80,), 160).cutter([100, 60])
    (80,)
    """
    return mergecomp(text, cuts=boundaries, elements=numel)
