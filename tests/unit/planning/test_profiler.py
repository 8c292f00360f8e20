"""Measure dense steps, decide once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gradwire.planning.change_detection import noise_of
from gradwire.planning.costs import BackwardTiming
from gradwire.planning.facts import Facts, Times
from gradwire.planning.profiler import DISCARDED, MEASURED, ORDINARY, WarmupProfiler


def _facts(
    steps: Sequence[Times], profiler: WarmupProfiler | None = None, world: int = 1
) -> list[Facts | None]:
    """What is known after each of the steps, which all ranks measure alike."""
    profiler = profiler or WarmupProfiler()
    return [profiler.observe(world * [profiler.row(lambda times=times: times)]) for times in steps]


def test_the_first_two_steps_do_not_count() -> None:
    steps = [Times(1.0, (allreduce_s,)) for allreduce_s in (100.0, 100.0, 2.0, 2.0, 2.0)]
    assert _facts(steps) == [None] * 4 + [Facts(1.0, 2.0, 1, collectives_s=(2.0,), steps=5)]


def test_the_median_of_three_decides() -> None:
    steps = [Times(1.0, (allreduce_s,)) for allreduce_s in (0.0, 0.0, 9.0, 1.0, 3.0)]
    assert _facts(steps)[-1] == Facts(1.0, 3.0, 1, collectives_s=(3.0,), steps=5)


def test_the_number_of_collectives_may_change_with_the_buckets() -> None:
    durations = ((1.0,), (0.5, 0.5), (0.5, 0.5), (0.25, 0.25, 0.5), (1.0,))
    found = _facts([Times(1.0, each) for each in durations], world=2)
    assert found == [None] * 4 + [Facts(1.0, 1.0, 2, collectives_s=(0.25, 0.25, 0.5), steps=5)]


def test_ready_times_are_those_of_the_typical_step_and_what_precedes_it_the_median() -> None:
    measured = ((9.0, 9.0, 0.9), (9.0, 9.0, 0.9), (0.5, 3.0, 0.3), (60.0, 2.0, 0.2), (0.75, 1.0, 0.1))
    steps = [
        Times(1.0, (allreduce_s,), before_s, (0.25, ready_s)) for before_s, allreduce_s, ready_s in measured
    ]
    backward = BackwardTiming(0.75, (0.25, 0.2), (10, 20), 1.0)
    found = _facts(steps, WarmupProfiler(numel=(10, 20)), world=2)
    assert found == [None] * 4 + [Facts(1.0, 2.0, 2, backward, collectives_s=(2.0,), steps=5)]


def test_ordinary_steps_are_timed_whole_by_the_slowest_rank_before_any_is_taken_apart() -> None:
    """A step's time rides on the status vote of the next one."""
    ranks = [WarmupProfiler(ordinary=ORDINARY) for _ in range(2)]
    ordinary_s = 2 * [1.0, 7.0, 3.0, 2.0, 60.0] + 3 * [3.0]
    assert len(ordinary_s) == ORDINARY
    took_s = [90.0, 80.0, *ordinary_s, 50.0, 50.0, 50.0]
    apart, facts = [], []
    for step_s in took_s:
        apart.append([each.is_serial for each in ranks])
        rows = [each.row(lambda: Times(1.0, (2.0,))) for each in ranks]
        facts.append([each.observe(rows, step_s + rank) for rank, each in enumerate(ranks)])
    ordinary = DISCARDED + ORDINARY
    assert apart == [[False] * 2] * ordinary + [[True] * 2] * MEASURED
    assert facts[:-1] == [[None] * 2] * (ordinary + MEASURED - 1)
    # By the rank that takes a second more: the median of 1, 7, 3, 2 and 60.
    noise = noise_of([each + 1.0 for each in ordinary_s])
    known = Facts(1.0, 2.0, 2, collectives_s=(2.0,), dense_s=4.0, dense_noise=noise, steps=len(took_s))
    assert facts[-1] == [known] * 2


def test_rows_of_ordinary_steps_are_short() -> None:
    profiler = WarmupProfiler(numel=(10, 20), ordinary=ORDINARY)

    def asked() -> Times:
        pytest.fail("nothing is taken apart yet")

    for _ in range(DISCARDED + ORDINARY):
        row = profiler.row(asked)
        assert len(row) == 2
        assert profiler.observe([row], 1.0, 0.25) is None
    times = Times(1.0, (2.0,), 0.5, (0.1, 0.2))
    assert profiler.row(lambda: times) == (1.0, 0.25, *times.row)


def test_exposed_shares_are_known_once_before_any_step_is_taken_apart() -> None:
    """By step those of the rank that computed longest, which is not always the same."""
    ranks = [WarmupProfiler(ordinary=ORDINARY) for _ in range(2)]
    shares = [(0.9, 0.8), (0.7, 0.6), *((0.01 * step, 0.5) for step in range(ORDINARY - 1)), (0.5, 0.2)]
    found = []
    for step_shares in [*shares, *MEASURED * [(0.4, 0.3)]]:
        rows = [each.row(lambda: Times(1.0, (2.0,))) for each in ranks]
        for each, share in zip(ranks, step_shares, strict=True):
            each.observe(rows, 1.0, share)
        found.append([each.exposed for each in ranks])
    known = tuple(0.01 * step for step in range(ORDINARY - 1))
    ordinary = DISCARDED + ORDINARY
    assert found[ordinary - 1] == [known, known], "the last one is not heard of yet"
    assert all(each == [(), ()] for each in found[: ordinary - 1] + found[ordinary:])


def test_without_ordinary_steps_nothing_is_known_of_what_is_exposed() -> None:
    profiler = WarmupProfiler()
    for _ in range(DISCARDED + MEASURED):
        profiler.observe([profiler.row(lambda: Times(1.0, (2.0,)))], 1.0, 0.5)
        assert profiler.exposed == ()


def test_without_ordinary_steps_nobody_knows_what_one_takes() -> None:
    found = _facts(5 * [Times(1.0, (2.0,))])[-1]
    assert found is not None
    assert found == replace(found, dense_s=None)
