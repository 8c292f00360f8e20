"""Recipes with fewer cuts than their own, for links on which a message costs more than its bytes."""

from __future__ import annotations

from gradwire.planning.cuts import coarse_cuts
from gradwire.recipes.base import Composition
from gradwire.recipes.mergecomp import mergecomp
from gradwire.recipes.parse import steady


def in_fewer_units(text: str, numel: int, units: int) -> tuple[Composition, ...]:
    """The recipe `text` with its lane of `numel` elements in fewer than `units` units, in up to five ways.

    None where units take turns, because their number is then part of the recipe.

    >>> [each.cutter([100, 60]) for each in in_fewer_units("int8", 160, units=3)]
    [(80,), ()]
    >>> in_fewer_units("covap(interval=4)", 160, units=24)
    ()
    """
    if steady(text, "inner").exchange.laws.cycle > 1:
        return ()
    return tuple(
        mergecomp(text, cuts=cuts, elements=numel) for cuts in coarse_cuts(numel) if len(cuts) + 1 < units
    )
