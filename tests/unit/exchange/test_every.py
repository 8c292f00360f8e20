"""Each unit every I-th step."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.dense import dense
from gradwire.exchange.every import every
from gradwire.moment import Moment
from tests.unit.exchange.steps import step


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7])
def test_unit_t_travels_at_step_s_when_t_plus_s_is_a_multiple_of_the_interval(interval: int) -> None:
    exchange = every(interval, dense())
    for unit in range(2 * interval):
        for number in range(3 * interval):
            at = Moment(number, unit, 0, 1)
            assert exchange.sends(at) is ((unit + number) % interval == 0)
            assert bool(exchange.rounds(5, torch.float32, at)) is exchange.sends(at)


def test_first_steps_of_interval_three_by_hand() -> None:
    exchange = every(3, dense())
    sent = [[unit for unit in range(6) if exchange.sends(Moment(s, unit, 0, 1))] for s in range(4)]
    assert sent == [[0, 3], [2, 5], [1, 4], [0, 3]]


def test_unit_that_does_not_travel_hands_zeros_and_keeps_everything() -> None:
    for rank, result in enumerate(step(every(4, dense()), lambda rank: torch.full((3,), rank + 1.0), 2, 1)):
        assert result.mean.tolist() == [0.0] * 3
        assert result.unsent.tolist() == [rank + 1.0] * 3
        assert result.rounds == []


def test_unit_that_travels_is_exchanged() -> None:
    for result in step(every(4, dense()), lambda rank: torch.full((3,), rank + 1.0), 3, number=1, unit=3):
        assert result.mean.tolist() == pytest.approx([2.0] * 3, rel=1e-6)
        assert result.unsent.tolist() == [0.0] * 3


@pytest.mark.parametrize("interval", [0, -1])
def test_interval_below_one_raises(interval: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1 step"):
        every(interval, dense())
