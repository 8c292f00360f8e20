"""Boundaries for a codec on a thread of its own: against every grouping, and never worse than a simple
one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gradwire.planning.boundaries import even_groups, layer_wise
from gradwire.planning.costs import BackwardTiming, Line
from gradwire.planning.merge import GroupCost, seconds_of
from gradwire.planning.merge_worker import improved, moved_boundaries, worker_boundaries
from tests.support.planning_problems import all_groupings, backward, cost, groups_of
from tests.unit.planning.ticking import Clockwork, Unit


def whole(draw: Random, base: int, slope: int) -> Line:
    return Line(draw.randint(0, base), draw.randint(0, slope))


@pytest.mark.parametrize("seed", range(10))
def test_seconds_are_what_clockwork_takes_for_such_groups(seed: int) -> None:
    draw = Random(seed)
    numel = tuple(draw.randint(1, 3) for _ in range(12))
    ready = sorted(draw.randint(0, 30) for _ in numel)
    of = BackwardTiming(0.0, tuple(map(float, ready)), numel, 0.0)
    encode, wire, decode = whole(draw, 3, 1), Line(1.0, draw.randint(0, 2)), whole(draw, 2, 1)
    seconds = seconds_of(of, GroupCost(encode, wire, decode))
    for boundaries in ((), (7,), (1, 4, 11), layer_wise(12)):
        units = [
            Unit(ready[stop - 1], int(encode(size)), [int(wire(size))], int(decode(size)))
            for first, stop in groups_of(boundaries, 12)
            for size in [sum(numel[first:stop])]
        ]
        assert seconds(boundaries) == Clockwork(units).run()


def test_nearly_always_the_optimum() -> None:
    draw, excess = Random(3), []
    for _ in range(200):
        of = backward(draw, draw.randint(1, 8))
        at = cost(draw, of)
        seconds = seconds_of(of, at)
        best = min(seconds(boundaries) for boundaries in all_groupings(len(of.numel)))
        excess.append(seconds(worker_boundaries(of, at)) / best - 1)
    # A search that ends where no single move helps has no bound; what goal 9 allows it must keep on average,
    # and miss in few cases.
    assert sum(excess) / len(excess) < 0.001
    assert sum(each > 0.02 for each in excess) <= len(excess) / 50


@pytest.mark.parametrize("tensors", [2, 7, 60, 161])
def test_never_worse_than_a_simple_grouping(tensors: int) -> None:
    draw = Random(tensors)
    of = backward(draw, tensors)
    at = cost(draw, of)
    seconds = seconds_of(of, at)
    found = seconds(worker_boundaries(of, at))
    for boundaries in (layer_wise(tensors), *(even_groups(tensors, parts) for parts in (1, 2, 3, 4))):
        assert found <= seconds(boundaries)


@pytest.mark.parametrize("tensors", [7, 60, 161])
def test_boundaries_move_to_where_other_costs_want_them(tensors: int) -> None:
    draw, excess = Random(tensors), []
    for _ in range(10):
        of = backward(draw, tensors)
        cheap = cost(draw, of)
        encode, decode = (replace(line, base_s=10.0 * line.base_s) for line in (cheap.encode, cheap.decode))
        dear = replace(cheap, encode=encode, decode=decode)
        seconds, made = seconds_of(of, dear), worker_boundaries(of, cheap)
        found = seconds(moved_boundaries(of, dear, made))
        assert found <= seconds(made)
        excess.append(found / seconds(worker_boundaries(of, dear)) - 1)
    assert sum(excess) / len(excess) < 0.02


@pytest.mark.parametrize("tensors", [0, 1])
def test_nothing_to_cut(tensors: int) -> None:
    draw = Random(0)
    of = backward(draw, tensors)
    assert worker_boundaries(of, cost(draw, of)) == moved_boundaries(of, cost(draw, of), ()) == ()


def test_every_move_is_found() -> None:
    start = (3, 7)
    for wanted in ((3,), (3, 6), (3, 7, 8), (1, 7)):
        # Everything else is as bad as the start, so one move must lead there.
        found = improved(
            lambda boundaries, wanted=wanted: float(boundaries != wanted), [start], 10, effort=1000
        )
        assert found == wanted


def test_a_search_without_effort_keeps_the_best_start() -> None:
    assert improved(lambda boundaries: abs(len(boundaries) - 2), [(1,), (2, 5)], 10, effort=0) == (2, 5)
