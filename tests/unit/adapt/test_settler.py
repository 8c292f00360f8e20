"""Measure five dense steps, decide once."""

from __future__ import annotations

from gradwire.adapt import Settler
from gradwire.plan import Facts


def test_the_first_two_steps_do_not_count() -> None:
    settler = Settler()
    rows = [[(1.0, 100.0)], [(1.0, 100.0)], [(1.0, 2.0)], [(1.0, 2.0)], [(1.0, 2.0)]]
    assert [settler.observe(row) for row in rows] == [None, None, None, None, Facts(1.0, 2.0, 1)]


def test_the_median_of_three_decides() -> None:
    settler = Settler()
    for allreduce_s in (0.0, 0.0, 9.0, 1.0):
        settler.observe([(1.0, allreduce_s)])
    assert settler.observe([(1.0, 3.0)]) == Facts(1.0, 3.0, 1)


def test_the_number_of_collectives_may_change_with_the_buckets() -> None:
    settler = Settler()
    for durations in ((1.0,), (0.5, 0.5), (0.5, 0.5), (0.25, 0.25, 0.5)):
        assert settler.observe([(1.0, *durations), (1.0, *durations)]) is None
    assert settler.observe([(1.0, 1.0), (1.0, 1.0)]) == Facts(1.0, 1.0, 2)
