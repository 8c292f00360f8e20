"""Tensors in ready order, grouped into units: what every way to cut works on.

A grouping is a tuple of inner cuts: k stands for a cut between the k-th tensor and the next, counted from
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from gradwire.planning.collectives import Sends
from gradwire.planning.costs import Backward, CodecCost
from gradwire.planning.predict import FREE, UnitWork

Cuts = tuple[int, ...]


def groups_of(cuts: Cuts, tensors: int) -> list[tuple[int, int]]:
    """(first, stop) of every group.

    >>> groups_of((2, 3), 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    return list(pairwise((0, *cuts, tensors)))


def layer_wise(tensors: int) -> Cuts:
    """Every tensor alone."""
    return tuple(range(1, tensors))


def even_groups(tensors: int, parts: int) -> Cuts:
    """As many tensors in every group: MergeComp's naive split, which does not look at their sizes.

    >>> even_groups(7, 3)
    (2, 4)
    """
    parts = max(1, min(parts, tensors))
    return tuple(tensors * part // parts for part in range(1, parts))


def element_cuts(cuts: Cuts, numel: Sequence[int]) -> tuple[int, ...]:
    """The same cuts counted in elements, as an arena takes them."""
    ends = list(accumulate(numel, initial=0))
    return tuple(ends[cut] for cut in cuts)


def ready_of_element(backward: Backward) -> Callable[[int], float]:
    """From how many leading elements one wants to when all of them are ready; 0 for none."""
    ends = list(accumulate(backward.numel))
    latest = list(accumulate(backward.ready_s, max))

    def ready_s(leading: int) -> float:
        return latest[min(bisect_left(ends, leading), len(latest) - 1)] if leading > 0 and latest else 0.0

    return ready_s


def units_between(
    backward: Backward,
    cuts: Sequence[int],
    rounds: Callable[[int, int], tuple[Sends, ...]],
    codec: CodecCost = FREE,
    decodes: float = 1.0,
) -> list[UnitWork]:
    """The units between element cuts, for `predict`: `rounds(index, numel)` names a unit's collectives.

    >>> from gradwire.planning.collectives import Transfer
    >>> backward = Backward(0.0, (1.0, 3.0), (10, 30), 3.0)
    >>> rounds = lambda _index, numel: (Transfer("all_reduce", 4.0 * numel),)
    >>> units = units_between(backward, (10, 25), rounds)
    >>> [(unit.ready_s, unit.numel) for unit in units]
    [(1.0, 10), (3.0, 15), (3.0, 15)]
    """
    ready_s = ready_of_element(backward)
    bounds = pairwise((0, *cuts, sum(backward.numel)))
    return [
        UnitWork(ready_s(stop), stop - start, rounds(index, stop - start), codec, decodes)
        for index, (start, stop) in enumerate(bounds)
    ]
