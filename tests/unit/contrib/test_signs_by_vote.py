"""Majority vote: who wins, who abstains, what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.codec.select.topk import top_k
from gradwire.comm import ThreadComm, run_ranks
from gradwire.contrib.signs_by_vote import MajorityVote, Signum, majority_vote
from gradwire.exchange.base import run
from gradwire.exchange.compose import forget, remember
from gradwire.exchange.leader import leader
from gradwire.memory import NoMemory, Residual
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.whole import parts_of

SIZES = (100, 3, 1000, 64)
NUMEL = sum(SIZES)
WORLDS = (1, 2, 3, 4, 5, 7)


def vote(exchange: MajorityVote, inputs: list[Tensor], sizes: tuple[int, ...] = SIZES) -> Tensor:
    """The mean of rank 0; all ranks' have the same bits."""

    def body(comm: ThreadComm) -> Tensor:
        x = inputs[comm.rank].clone()
        mean = torch.full_like(x, torch.nan)
        run(exchange, x, mean, comm, ExchangeContext(0, 0, comm.rank, comm.world, parts=parts_of(*sizes)))
        assert torch.equal(x.nan_to_num(), inputs[comm.rank].nan_to_num())
        return mean

    first, *others = run_ranks(len(inputs), body)
    assert all(torch.equal(first.nan_to_num(9.0), other.nan_to_num(9.0)) for other in others)
    return first


def drawn(world: int, numel: int = NUMEL) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]


@looped("world", WORLDS)
def test_the_majority_wins_and_a_tie_is_zero(world: int) -> None:
    inputs = drawn(world)
    expected = torch.stack(inputs).sign().sum(0).sign()
    assert torch.equal(vote(majority_vote(), inputs), expected)
    assert bool((expected == 0).any()) == (world % 2 == 0)


@looped("world", WORLDS)
@looped("dtype", [torch.float32, torch.float64])
def test_the_scale_is_the_mean_over_ranks_of_the_mean_magnitude_of_a_parameter(world: int, dtype) -> None:
    inputs = [x.to(dtype) for x in drawn(world)]
    signs = vote(majority_vote(), inputs)
    means = [sum(part.abs().mean() for part in parts) / world for parts in split(inputs)]
    expected = torch.cat([part * mean for part, mean in zip(signs.split(list(SIZES)), means, strict=True)])
    # Means of float32 sums here, of float64 there, and W roundings of their sum.
    torch.testing.assert_close(vote(majority_vote("l1"), inputs), expected, rtol=1e-5, atol=0)


def split(inputs: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Part by part, what the ranks have of it."""
    return list(zip(*(x.split(list(SIZES)) for x in inputs), strict=True))


@looped("scale", ["none", "l1"])
@looped("world", [2, 3, 5])
def test_who_has_nothing_of_a_parameter_abstains(world: int, scale) -> None:
    inputs = drawn(world)
    for rank, x in enumerate(inputs):
        x[100:103] = 0.0  # nobody has any of the second part
        if rank:
            x[103:1103] = 0.0  # and of the third only one rank
    mean = vote(majority_vote(scale), inputs)
    assert not mean[100:103].any()
    assert torch.equal(mean[103:1103].sign(), inputs[0][103:1103].sign())


def test_rows_of_zeros_stay_where_they_are() -> None:
    inputs = drawn(3, 640)
    for x in inputs:
        x[128:256] = 0.0
    mean = vote(majority_vote("l1"), inputs, (640,))
    assert not mean[128:256].any()
    assert mean[:128].all()
    assert mean[256:].all()


def test_a_zero_among_others_votes_as_positive() -> None:
    inputs = [torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])]
    assert vote(majority_vote(), inputs, (2,)).tolist() == [1.0, 1.0]


@looped("world", [1, 3, 4])
def test_poison_in_a_scale_reaches_all_ranks_and_no_other_parameter(world: int) -> None:
    inputs = drawn(world)
    inputs[-1][500] = torch.nan
    mean = vote(majority_vote("l1"), inputs)
    assert mean[103:1103].isnan().all()
    assert mean[:103].isfinite().all()
    assert mean[1103:].isfinite().all()


@looped("world", WORLDS)
def test_traffic_is_at_most_three_eighths_of_a_byte_per_element(world: int) -> None:
    numel, ctx = 2**20, ExchangeContext(0, 0, 0, world)
    rounds = majority_vote().rounds(numel, torch.float32, ctx)
    sent = sum(round_.wire_bytes(world) for round_ in rounds)
    bits = numel * 65 / 512
    if world <= 3:
        assert [round_.verb for round_ in rounds] == ["all_gather"]
        assert sent == (world - 1) * bits
    else:
        assert [round_.verb for round_ in rounds] == ["all_to_all", "all_gather"]
        # Shares are whole groups, and their flags whole words.
        share = (world - 1) / world
        assert sent == pytest.approx(share * (bits + numel / 4), rel=1e-3)
    assert sent < 3 / 8 * numel * 1.01


def test_scales_cost_four_bytes_per_parameter_and_eight_in_float64() -> None:
    ctx = ExchangeContext(0, 0, 0, 2, parts=parts_of(*SIZES))
    for dtype, expected in ((torch.float32, 16), (torch.float64, 32)):
        (plain,), (scaled,) = (
            majority_vote(scale).rounds(NUMEL, dtype, replace(ctx)) for scale in ("none", "l1")
        )
        assert scaled.payload_bytes - plain.payload_bytes == expected


def test_it_can_be_forgotten_but_not_remembered() -> None:
    assert forget(majority_vote()).memory == NoMemory()
    assert forget(majority_vote(), Signum(0.5)).memory == Signum(0.5)
    with pytest.raises(ValueError, match="not contractive"):
        remember(majority_vote())


def test_what_is_unsent_is_not_to_be_forgotten() -> None:
    with pytest.raises(ValueError, match=r"remember\(\.\.\.\)"):
        forget(leader(top_k(0.1)), Residual())


def test_an_unknown_scale_raises() -> None:
    with pytest.raises(ValueError, match="scale='l2' is none of none, l1"):
        majority_vote("l2")
