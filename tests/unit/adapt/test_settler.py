"""Measure five dense steps, decide once."""

from __future__ import annotations

from gradwire.adapt import Settler
from gradwire.plan import Facts
from gradwire.plan.costs import Backward
from gradwire.plan.facts import Times


def test_the_first_two_steps_do_not_count() -> None:
    settler = Settler()
    rows = [[(1.0, 0.0, allreduce_s)] for allreduce_s in (100.0, 100.0, 2.0, 2.0, 2.0)]
    assert [settler.observe(row) for row in rows] == [None] * 4 + [Facts(1.0, 2.0, 1, collectives_s=(2.0,))]


def test_the_median_of_three_decides() -> None:
    settler = Settler()
    for allreduce_s in (0.0, 0.0, 9.0, 1.0):
        settler.observe([(1.0, 0.0, allreduce_s)])
    assert settler.observe([(1.0, 0.0, 3.0)]) == Facts(1.0, 3.0, 1, collectives_s=(3.0,))


def test_the_number_of_collectives_may_change_with_the_buckets() -> None:
    settler = Settler()
    for durations in ((1.0,), (0.5, 0.5), (0.5, 0.5), (0.25, 0.25, 0.5)):
        assert settler.observe(2 * [(1.0, 0.0, *durations)]) is None
    assert settler.observe(2 * [(1.0, 0.0, 1.0)]) == Facts(1.0, 1.0, 2, collectives_s=(0.25, 0.25, 0.5))


def test_ready_times_are_those_of_the_typical_step_and_what_precedes_it_the_median() -> None:
    settler = Settler(numel=(10, 20))
    for before_s, allreduce_s in ((9.0, 9.0), (9.0, 9.0), (0.5, 3.0), (60.0, 2.0)):
        times = Times(1.0, (allreduce_s,), before_s, (0.25, allreduce_s / 10))
        assert settler.observe([times.row, times.row]) is None
    facts = settler.observe(2 * [Times(1.0, (1.0,), 0.75, (0.25, 0.1)).row])
    backward = Backward(0.75, (0.25, 0.2), (10, 20), 1.0)
    assert facts == Facts(1.0, 2.0, 2, backward, collectives_s=(2.0,))
