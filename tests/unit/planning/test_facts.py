"""From every rank's times to numbers that all agree on."""

from __future__ import annotations

import pytest

from gradwire.planning.costs import BackwardTiming
from gradwire.planning.facts import Facts, Times, facts_of_step, typical
from gradwire.planning.interval import interval_for


def test_a_collective_takes_as_long_as_for_the_rank_that_entered_last() -> None:
    early, late = Times(1.0, (0.9, 0.2)), Times(3.0, (0.5, 0.7))
    facts = facts_of_step([early, late])
    assert facts == Facts(backward_s=3.0, allreduce_s=0.5 + 0.2, world=2, collectives_s=(0.5, 0.2))


def test_ranks_with_different_numbers_of_collectives_are_no_step() -> None:
    with pytest.raises(ValueError, match="zip"):
        facts_of_step([Times(1.0, (0.5,)), Times(1.0, (0.5, 0.5))])


def test_a_step_without_collectives_costs_nothing() -> None:
    assert facts_of_step([Times(1.0)]).ccr == 0.0


def test_a_backward_pass_of_no_time_does_not_divide_by_zero() -> None:
    assert facts_of_step([Times(0.0, (0.1,))]).ccr > 1e6


def test_all_wait_for_the_rank_that_computes_longest_so_its_times_stand_for_all() -> None:
    """Not each time's maximum: the rank that begins late need not compute for long."""
    slow, quick = Times(2.0, (0.5,), 4.0, (0.75, 2.0)), Times(2.5, (0.5,), 2.0, (0.8, 2.5))
    assert facts_of_step([quick, slow], (7, 8)).backward == BackwardTiming(4.0, (0.75, 2.0), (7, 8), 2.0)


def test_ranks_share_cores_so_the_processor_time_of_collectives_is_that_of_all_in_the_mean() -> None:
    ranks = [Times(1.0, (0.5,), sending_s=each) for each in (0.25, 0.75)]
    assert facts_of_step(ranks).sending_s == 0.5


def test_one_step_beside_which_another_thread_worked_does_not_make_collectives_dear() -> None:
    steps = [Facts(1.0, ccr, 2, sending_s=each) for ccr, each in ((0.5, 9.0), (0.1, 0.25), (0.9, 0.5))]
    assert typical(steps) == Facts(1.0, 0.5, 2, sending_s=0.5)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_typical_step_is_the_median_by_ratio(order: tuple[int, ...]) -> None:
    steps = [Facts(1.0, 0.1, 2), Facts(1.0, 0.5, 2), Facts(1.0, 9.0, 2)]
    assert typical([steps[i] for i in order]) == Facts(1.0, 0.5, 2)


@pytest.mark.parametrize(
    ("ccr", "interval"), [(0.0, 1), (1.0, 1), (2.07, 3), (3.96, 4), (4.04, 4), (4.06, 5)]
)
def test_the_interval_is_the_rounded_ratios_ceiling(ccr: float, interval: int) -> None:
    assert interval_for(ccr) == interval
