"""Who leads, and what the others send."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.comm import Round
from gradwire.contrib.randomk import random_k
from gradwire.exchange.leader import leader, leader_in_turn
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step
from tests.unit.exchange.test_ar_topk import chosen, own_peak

WORLDS = (1, 2, 3, 4, 5, 7)


@looped("world", WORLDS)
def test_ranks_lead_in_turn(world: int) -> None:
    exchange = leader(top_k(0.1))
    leaders = [chosen(step(exchange, own_peak, world, number)) for number in range(2 * world)]
    assert leaders == [leader_in_turn(ExchangeContext(number, 0, 0, world)) for number in range(2 * world)]
    assert sorted(leaders) == sorted([*range(world)] * 2)


@looped("world", WORLDS)
def test_largest_norm_leads(world: int) -> None:
    for strongest in range(world):
        results = step(
            leader(top_k(0.1), "norm"),
            lambda rank, strongest=strongest: own_peak(rank) * (3.0 if rank == strongest else 1.0),
            world,
            number=world + 1,
        )
        assert chosen(results) == strongest


def test_norm_counts_the_whole_vector_and_not_its_peak() -> None:
    flat, peak = torch.full((100,), 1.0), torch.zeros(100)
    peak[7] = 9.0
    results = step(leader(top_k(0.01), "norm"), [flat, peak].__getitem__, 2)
    assert chosen(results) == 0


def test_lowest_rank_leads_among_equal_norms() -> None:
    assert chosen(step(leader(top_k(0.1), "norm"), own_peak, 4)) == 0


@looped("elect", ["round_robin", "norm"])
def test_poisoned_rank_keeps_the_order_of_rounds(elect) -> None:
    exchange = leader(random_k(0.1), elect)
    for result in step(exchange, lambda rank: own_peak(rank) * (torch.nan if rank == 1 else 1.0), 3):
        assert len(result.rounds) == (2 if elect == "round_robin" else 3)


def test_rounds_do_not_grow_with_the_world_but_for_the_norms() -> None:
    results = step(leader(top_k(0.1), "norm"), own_peak, 5)
    f32, i32 = torch.float32, torch.int32
    assert results[0].rounds == [
        Round("all_reduce", 5, f32),
        Round("all_reduce", 1, i32),
        Round("all_reduce", 1, f32),
    ]


def test_many_indices_travel_coded_and_values_in_16_bits() -> None:
    exchange = leader(top_k(0.25), dtype=torch.float16)
    results = step(exchange, lambda rank: torch.randn(1000, generator=generator(rank)), 3)
    assert results[0].rounds == [
        Round("all_reduce", 27, torch.int32),  # 600 and 250 bits
        Round("all_reduce", 250, torch.float16),
    ]
    wide = leader(top_k(0.25), dtype=torch.bfloat16)
    assert (
        wide.rounds(1000, torch.float16, ExchangeContext(0, 0, 0, 3))[1].dtype == torch.float16
    )  # its own is as short


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_16_bits_cannot_say_stays_unsent() -> None:
    exchange = leader(top_k(1.0), dtype=torch.float16)
    fine, huge = 1.0 + 2**-12, 3e5
    for result in step(exchange, lambda _rank: torch.tensor([fine, huge, -huge]), 2):
        # Each rank may contribute the largest power of two below half of 65504.
        assert result.mean.tolist() == [1.0, 32768.0, -32768.0]
        assert result.unsent.tolist() == [2**-12, huge - 32768.0, 32768.0 - huge]


@looped("world", [*WORLDS, 6, 9, 13])
@looped("dtype", [torch.float16, torch.bfloat16])
def test_what_is_too_large_for_16_bits_stays_finite_on_any_world(world: int, dtype: torch.dtype) -> None:
    largest = torch.finfo(torch.float32).max
    for result in step(leader(top_k(1.0), dtype=dtype), lambda _: torch.tensor([largest, -largest]), world):
        assert result.mean.isfinite().all()
        assert result.unsent.isfinite().all()
        assert result.mean[0] > torch.finfo(dtype).max / 4


def test_unknown_election_or_type_raises() -> None:
    with pytest.raises(ValueError, match="none of round_robin, norm"):
        leader(top_k(0.1), "strongest")
    with pytest.raises(ValueError, match=r"choose torch\.float16 or torch\.bfloat16"):
        leader(top_k(0.1), dtype=torch.int8)
