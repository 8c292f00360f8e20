"""Combinators: what they pass on, what they refuse, and which units travel when."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.base import Exchange
from gradwire.exchange.compose import EveryK, Scheme, WarmUp, every, remember, warm
from gradwire.exchange.dense import dense
from gradwire.exchange.payloads import gather
from gradwire.memory import Residual
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step

TOPK = gather(sparse(top_k(0.25)))


def test_remember_adds_plain_error_feedback_unless_told_otherwise() -> None:
    assert remember(TOPK).memory == Residual()
    assert remember(TOPK, Residual(0.5, 0.1, 50)).memory == Residual(0.5, 0.1, 50)


def test_remembered_exchange_may_not_run_in_place() -> None:
    # In place nothing would be left to remember.
    assert dense().laws.in_place
    assert not remember(dense()).laws.in_place


@looped(("number", "kept"), [(0, 0), (2, 0), (3, 3), (50, 3)])
def test_warm_is_dense_until_its_step_and_then_itself(number: int, kept: int) -> None:
    for result in step(warm(3, TOPK), lambda rank: torch.arange(1.0, 5.0), 2, number):
        assert int(result.unsent.count_nonzero()) == kept


def test_warm_remembers_as_what_it_warms_up() -> None:
    assert warm(3, remember(TOPK)).memory == Residual()
    assert warm(3, TOPK).memory is None


def travelling(exchange: Exchange, steps: int, unit: int = 0) -> list[list[str]]:
    """The verbs of a unit's rounds, step by step."""
    contexts = [ExchangeContext(step, unit, 0, 2) for step in range(steps)]
    return [[each.verb for each in exchange.rounds(8, torch.float32, ctx)] for ctx in contexts]


RESTS, DENSE, CHOSEN = list[str](), ["all_reduce"], ["all_gather"]


def test_a_memory_and_a_schedule_make_one_scheme_in_either_order() -> None:
    assert remember(warm(3, TOPK)) == warm(3, remember(TOPK)) == Scheme(TOPK, Residual(), WarmUp(3))
    assert remember(every(2, TOPK)) == every(2, remember(TOPK)) == Scheme(TOPK, Residual(), EveryK(2))
    assert remember(warm(0, TOPK)) == remember(every(1, TOPK)) == remember(TOPK) == Scheme(TOPK, Residual())


def test_a_schedule_over_another_runs_within_it() -> None:
    rests_outside = remember(every(2, warm(3, TOPK), order="paper"))
    assert travelling(rests_outside, 6) == [DENSE, RESTS, DENSE, RESTS, CHOSEN, RESTS]
    rests_inside = remember(warm(3, every(2, TOPK, order="paper")))
    assert travelling(rests_inside, 6) == [DENSE, DENSE, DENSE, RESTS, CHOSEN, RESTS]
    in_turns = remember(every(3, every(2, TOPK, order="paper"), order="paper"))
    assert travelling(in_turns, 7) == [CHOSEN, *[RESTS] * 5, CHOSEN]
    for exchange in (rests_outside, rests_inside, in_turns):
        assert exchange.memory == Residual()
    assert [each.laws.cycle for each in (rests_outside, rests_inside, in_turns)] == [2, 2, 6]


def test_a_schedule_over_a_scheme_keeps_its_memory() -> None:
    nested = every(2, warm(3, remember(TOPK, Residual(0.5))), order="paper")
    assert nested.memory == Residual(0.5)
    assert remember(nested, Residual(0.25)).memory == Residual(0.25)


def test_negative_number_of_steps_raises() -> None:
    with pytest.raises(ValueError, match="steps=-1 must not be negative"):
        warm(-1, TOPK)


def test_first_steps_of_interval_three_by_hand() -> None:
    turns = EveryK(3, order="paper")
    sent = [[unit for unit in range(6) if turns.phase(ExchangeContext(s, unit, 0, 1))] for s in range(4)]
    assert sent == [[0, 3], [2, 5], [1, 4], [0, 3]]


@looped("interval", [0, -1])
def test_interval_below_one_raises(interval: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1 step"):
        every(interval, dense())


def test_an_order_that_is_none_raises() -> None:
    with pytest.raises(ValueError, match="order='drawn' is none of random, paper"):
        every(2, dense(), order="drawn")  # type: ignore[arg-type]
