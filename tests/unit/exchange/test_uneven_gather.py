"""Sizes that depend on the gradient are agreed before they reach a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, owe_zeros, run_ranks
from gradwire.contrib.threshold import fixed_threshold
from gradwire.errors import WireError
from gradwire.exchange.base import run
from gradwire.exchange.uneven_gather import agreed
from gradwire.laws import Laws
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.rounds import allows

VALUES = [
    torch.tensor([9.0, 1.0, 1.0, -8.0, 1.0, 0.0]),
    torch.tensor([1.0, 1.0, 7.0, 1.0, 1.0, 0.0]),
    torch.zeros(6),
]


def step(exchange: Any, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor, list[Round]]]:
    """Per rank: the mean, what is left, and the rounds."""

    def body(comm: ThreadComm) -> tuple[Tensor, Tensor, list[Round]]:
        x, metered = tensors[comm.rank].clone(), MeteredComm(comm)
        mean = torch.full_like(x, torch.nan)
        run(exchange, x, mean, metered, ExchangeContext(0, 0, comm.rank, comm.world))
        return mean, x, metered.rounds

    return run_ranks(len(tensors), body)


def test_everybody_sends_as_many_as_the_rank_with_the_most() -> None:
    found = step(agreed(fixed_threshold(5.0, at_most=0.5)), VALUES)
    sent = [x - left for x, (_, left, _) in zip(VALUES, found, strict=True)]
    # Two of each rank: what reaches the threshold, and where that is fewer, others.
    assert sent[0].tolist() == [9.0, 0.0, 0.0, -8.0, 0.0, 0.0]
    assert sent[1][2] == 7.0
    assert sent[1].count_nonzero() <= 2
    for mean, _, rounds in found:
        assert torch.allclose(mean, sum(sent, torch.zeros(6)) / 3)
        assert [each.verb for each in rounds] == ["all_gather"] * 2
        assert rounds[0] == Round("all_gather", 1, torch.int64)


def test_nothing_else_travels_when_nobody_has_chosen_anything() -> None:
    for rank, (mean, left, rounds) in enumerate(step(agreed(fixed_threshold(50.0)), VALUES)):
        assert not mean.any()
        assert torch.equal(left, VALUES[rank])
        assert rounds == [Round("all_gather", 1, torch.int64)]


def test_no_rank_sends_more_than_the_bound() -> None:
    exchange = agreed(fixed_threshold(0.5, at_most=1 / 3), torch.float16)
    announced = exchange.rounds(6, torch.float32, ExchangeContext(0, 0, 0, 3))
    for mean, _left, rounds in step(exchange, VALUES):
        assert mean.tolist() == pytest.approx([10 / 3, 0.0, 7 / 3, -8 / 3, 0.0, 0.0])
        assert all(allows(a, b) for a, b in zip(announced, rounds, strict=True))
        assert rounds[1].numel == announced[1].numel


@dataclass(frozen=True)
class Broken:
    """Fails on one rank, or says what it must not."""

    rank: int
    answer: int | None = None
    laws = Laws(contractive=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return 2

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        if ctx.rank != self.rank:
            return torch.tensor([0, 3])
        if self.answer is None:
            raise ArithmeticError("while choosing")
        return torch.arange(self.answer)


@looped("failing", [0, 1, 2])
def test_nothing_else_travels_when_a_rank_has_failed_to_choose(failing: int) -> None:
    exchange = agreed(Broken(failing))

    def body(comm: ThreadComm) -> list[Round]:
        x, mean, metered = VALUES[comm.rank].clone(), torch.full((6,), torch.nan), MeteredComm(comm)
        ctx = ExchangeContext(0, 0, comm.rank, 3)
        if comm.rank == failing:
            with pytest.raises(ArithmeticError):
                exchange.start(x, mean, metered, ctx)
            owe_zeros(metered, exchange.rounds(6, x.dtype, ctx)[len(metered.rounds) :], x.device)
        else:
            run(exchange, x, mean, metered, ctx)
            assert not mean.any()
        assert torch.equal(x, VALUES[comm.rank])
        return metered.rounds

    assert run_ranks(3, body) == [[Round("all_gather", 1, torch.int64)]] * 3


def test_a_rank_that_fails_to_encode_sends_zeros_and_raises() -> None:
    # Two indices that are out of range: taking their values fails, after counts have been agreed.
    @dataclass(frozen=True)
    class Outside(Broken):
        def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
            return torch.tensor([4, 900]) if ctx.rank == self.rank else torch.tensor([0, 3])

    def body(comm: ThreadComm) -> list[float] | str:
        mean = torch.empty(6)
        try:
            run(
                agreed(Outside(1)), VALUES[comm.rank].clone(), mean, comm, ExchangeContext(0, 0, comm.rank, 3)
            )
        except ValueError:
            return "raised"
        return mean.tolist()

    mine, theirs, other = run_ranks(3, body)
    assert theirs == "raised"
    assert mine == other == pytest.approx([3.0, 0.0, 0.0, -8 / 3, 0.0, 0.0])


def test_a_count_beyond_the_bound_is_refused_by_all() -> None:
    def body(comm: ThreadComm) -> str:
        exchange = agreed(Broken(2, answer=5))
        with pytest.raises(WireError, match=r"announces \[2, 2, 5\] elements, outside 0 … 2"):
            exchange.start(
                VALUES[comm.rank].clone(), torch.empty(6), comm, ExchangeContext(0, 0, comm.rank, 3)
            )
        return "refused"

    assert run_ranks(3, body) == ["refused"] * 3
