"""Combinators."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.compose import remember, warm
from gradwire.exchange.dense import dense
from gradwire.exchange.gather import gather
from gradwire.memory import Residual
from tests.unit.exchange.steps import step

TOPK = gather(sparse(top_k(0.25)))


def test_remember_adds_plain_error_feedback_unless_told_otherwise() -> None:
    assert remember(TOPK).memory == Residual()
    assert remember(TOPK, Residual(0.5, 0.1, 50)).memory == Residual(0.5, 0.1, 50)


def test_remembered_exchange_may_not_run_in_place() -> None:
    # In place nothing would be left to remember.
    assert dense().laws.in_place
    assert not remember(dense()).laws.in_place


@pytest.mark.parametrize(("number", "kept"), [(0, 0), (2, 0), (3, 3), (50, 3)])
def test_warm_is_dense_until_its_step_and_then_itself(number: int, kept: int) -> None:
    for result in step(warm(3, TOPK), lambda rank: torch.arange(1.0, 5.0), 2, number):
        assert int(result.unsent.count_nonzero()) == kept


def test_warm_remembers_as_what_it_warms_up() -> None:
    assert warm(3, remember(TOPK)).memory == Residual()
    assert warm(3, TOPK).memory is None


def test_negative_number_of_steps_raises() -> None:
    with pytest.raises(ValueError, match="steps=-1 must not be negative"):
        warm(-1, TOPK)
