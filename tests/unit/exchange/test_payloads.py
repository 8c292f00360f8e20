"""Payloads that are summed, and payloads that are gathered."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.cast import cast
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.payloads import gather, reduce
from tests.support.looped import looped
from tests.support.steps import step


def test_what_the_cast_dropped_stays_with_its_rank() -> None:
    # bfloat16 keeps 8 bits: of 257 it keeps 256 on rank 0, and of 1 everything on rank 1.
    inputs = [torch.tensor([2 * 257.0]), torch.tensor([2 * 1.0])]
    first, second = step(reduce(cast(torch.bfloat16)), inputs.__getitem__, 2)
    assert first.mean.item() == second.mean.item() == 256.0
    assert (first.unsent.item(), second.unsent.item()) == (2.0, 0.0)


@looped("world", [2, 4])
def test_sum_of_half_precision_payloads_stays_in_the_range_of_one(world: int) -> None:
    for result in step(reduce(cast(torch.float16)), lambda rank: torch.full((1,), 65000.0), world):
        assert result.mean.isfinite().all()


def test_payloads_that_cannot_be_summed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"use gather\(codec\)"):
        reduce(sparse(top_k(0.1)))


def test_each_rank_sends_its_own_largest_and_keeps_the_rest() -> None:
    inputs = [torch.tensor([8.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, -6.0, 2.0, 3.0])]
    first, second = step(gather(sparse(top_k(0.25))), inputs.__getitem__, 2)
    assert first.mean.tolist() == second.mean.tolist() == [4.0, -3.0, 0.0, 0.0]
    assert first.unsent.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.unsent.tolist() == [1.0, 0.0, 2.0, 3.0]
