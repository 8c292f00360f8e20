"""Recipes in few bits: what an all-gather changes, and what it does not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, Round, run_ranks
from gradwire.memory import NoMemory, Residual
from gradwire.recipes import recipe
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped


def _rounds(text: str, world: int) -> tuple[Round, ...]:
    built = recipe(text).build()
    return built.exchange.rounds(1 << 20, torch.float32, ExchangeContext(0, 0, 0, world))


@looped("name", ["int8", "int4", "fp8"])
def test_between_two_ranks_an_all_gather_costs_the_same_bytes_in_one_round(name: str) -> None:
    halves, whole = _rounds(name, 2), _rounds(f"{name}(collective='all_gather')", 2)
    assert {each.verb for each in halves} == {"all_to_all", "all_gather"}
    assert [each.verb for each in whole] == ["all_gather"]
    assert sum(each.wire_bytes(2) for each in halves) == whole[0].wire_bytes(2)


@looped("name", ["int8", "int4", "fp8"])
@looped(("feedback", "kind"), [(True, Residual), (False, NoMemory)])
def test_either_collective_remembers_if_it_is_to(name: str, feedback: bool, kind: type) -> None:
    for collective in ("all_reduce", "all_gather"):
        built = recipe(f"{name}(feedback={feedback}, collective='{collective}')").build()
        assert isinstance(built.exchange.memory, kind)


@looped("world", [2, 3, 7])
def test_bf16_with_one_sum_in_float32_rounds_every_value_twice(world: int) -> None:
    """Once each on its way to the owner, and once the mean: an all-reduce rounds every partial sum, too."""
    drawn = torch.randn(world, 4000, generator=torch.Generator().manual_seed(world))
    u = torch.finfo(torch.bfloat16).eps / 2
    mean = drawn.double().mean(0)
    # The sum itself is in float32, whose roundings are 2^-16 of these.
    bound = (1 + 2.0**-8) * u * (drawn.double().abs().mean(0) + mean.abs() * (1 + u))

    def rank(text: str, comm: Comm) -> Tensor:
        values = drawn[comm.rank].clone()
        ctx = ExchangeContext(0, 0, comm.rank, world)
        recipe(text).build().exchange.start(values, values, comm, ctx)()  # in place
        return values

    def off(text: str) -> Tensor:
        first, *others = run_ranks(world, partial(rank, text))
        assert all(torch.equal(first, each) for each in others)
        return (first.double() - mean).abs()

    assert (off("bf16(sum='fp32')") <= bound).all()
    if world == 7:
        assert (off("bf16") > bound).any(), "the bound tells them apart"


def test_bf16_sends_the_same_bytes_whichever_the_sum() -> None:
    for world in (2, 4, 8):
        summed, reduced = (
            sum(each.wire_bytes(world) for each in _rounds(text, world))
            for text in ("bf16(sum='fp32')", "bf16")
        )
        assert summed == reduced


def test_a_sum_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="sum='fp64' is none of bf16, fp32"):
        recipe("bf16(sum='fp64')")
