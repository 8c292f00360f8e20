"""Who leads is agreed, and `auto` follows what it has measured."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.comm import run_ranks
from gradwire.exchange.election import MARGIN, gain, in_turn, note, strongest
from gradwire.exchange.late import CYCLE
from gradwire.exchange.state import times_led
from gradwire.moment import Kept, Moment, Part

WORLD = 3
TRIAL = 2 * WORLD


def at(step: int, kept: Kept, unit: int = 0, world: int = WORLD) -> Moment:
    return Moment(step, unit, 0, world, kept=kept, parts=(Part("weight", (10,), 0, 10),))


def lead(kept: Kept, steps: range, gains: tuple[float, float]) -> list[bool]:
    """Which of `steps` went in turn, when going in turn gains gains[0] and electing by variance gains[1]."""
    ways = []
    for step in steps:
        moment = at(step, kept)
        ways.append(in_turn("auto", moment))
        note(moment, step % WORLD, gains[0] if ways[-1] else gains[1])
        kept.commit()
    return ways


@pytest.mark.parametrize(("gains", "better"), [((0.5, 0.6), False), ((0.6, 0.5), True), ((0.5, 0.505), True)])
def test_both_ways_are_tried_and_the_better_one_leads_until_the_next_cycle(gains, better: bool) -> None:
    cycle = [True] * TRIAL + [False] * TRIAL + [better] * (CYCLE * WORLD - 2 * TRIAL)
    assert lead(Kept(), range(2 * CYCLE * WORLD), gains) == cycle * 2


def test_auto_changes_its_mind_when_gains_change() -> None:
    kept, cycle = Kept(), CYCLE * WORLD
    assert not any(lead(kept, range(cycle), (0.5, 0.9))[2 * TRIAL :])
    assert all(lead(kept, range(cycle, 2 * cycle), (0.9, 0.5))[2 * TRIAL :])


def test_what_the_memories_had_left_from_the_other_way_does_not_count() -> None:
    kept = Kept()
    for step in range(2 * TRIAL):
        settling = step % TRIAL < WORLD
        note(at(step, kept), 0, 1.0 if settling and step < TRIAL else 0.5 if step < TRIAL else 0.6)
        kept.commit()
    assert not in_turn("auto", at(2 * TRIAL, kept))


def test_a_small_advantage_does_not_pay_for_a_round() -> None:
    assert MARGIN > 1
    better = 0.5 * MARGIN * 1.001
    assert not any(lead(Kept(), range(CYCLE * WORLD), (0.5, better))[2 * TRIAL :])


def test_without_measurements_ranks_lead_in_turn() -> None:
    # As after a change of world, or a plan that began in the middle of a cycle.
    kept = Kept()
    note(at(0, kept, world=5), 4, 0.3)
    kept.commit()
    assert in_turn("auto", at(2 * TRIAL + 1, kept))


def test_a_step_that_is_not_committed_leaves_no_trace() -> None:
    kept = Kept()
    note(at(0, kept), 2, None)
    kept.discard()
    assert times_led([kept]) is None


def test_times_led_add_up_over_units_and_lanes() -> None:
    lanes = [Kept(), Kept()]
    for kept, unit, leader in [(0, 0, 2), (0, 1, 2), (1, 0, 0), (0, 0, 1)]:
        note(at(0, lanes[kept], unit), leader, None)
        lanes[kept].commit()
    assert times_led(lanes) == [1, 1, 2]
    assert times_led([Kept()]) is None


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_largest_norm_wins_and_the_lowest_rank_among_equals(world: int) -> None:
    for winner in range(world):
        norms = [2.0 if rank >= winner else 1.0 for rank in range(world)]
        elected = run_ranks(
            world, lambda comm, norms=norms: strongest(torch.full((4,), norms[comm.rank]), comm)
        )
        assert elected == [winner] * world


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((5.0, 10.0), 0.25),
        ((0.0, 2.0), 0.0),
        ((0.0, 0.0), 1.0),
        ((math.nan, 1.0), 0.0),
        ((math.inf, math.inf), 0.0),
    ],
)
def test_gain_is_a_share_whatever_the_norms(norms: tuple[float, float], expected: float) -> None:
    assert gain(*norms) == expected
