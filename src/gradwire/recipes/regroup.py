"""Recipes with fewer cuts than their own, for links on which a message costs more than its bytes."""

from __future__ import annotations

from gradwire.exchange.base import Exchange
from gradwire.planning.cuts import Cuts, coarse_cuts
from gradwire.recipes.base import Composition
from gradwire.recipes.mergecomp import mergecomp


def fewer_cuts(exchange: Exchange, numel: int, units: int) -> tuple[Cuts, ...]:
    """Up to five sets of cuts of a flat buffer of `numel` elements into fewer than `units` units.

    Empty if units take turns: their number is part of the recipe then.

    >>> from gradwire.recipes.parse import steady
    >>> [fewer_cuts(steady(text, "inner").exchange, 160, 3) for text in ("int8", "covap(interval=4)")]
    [((80,), ()), ()]
    """
    if exchange.laws.cycle > 1:
        return ()
    return tuple(cuts for cuts in coarse_cuts(numel) if len(cuts) + 1 < units)


def with_cuts(text: str, cuts: Cuts, numel: int) -> Composition:
    """The recipe `text` whose flat buffer of `numel` elements has these `cuts`.

    >>> with_cuts("int8", (80,), 160).cutter([100, 60])
    (80,)
    """
    return mergecomp(text, cuts=cuts, elements=numel)
