"""All-gather of payloads."""

from __future__ import annotations

import torch

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.gather import gather
from tests.unit.exchange.steps import step


def test_each_rank_sends_its_own_largest_and_keeps_the_rest() -> None:
    inputs = [torch.tensor([8.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, -6.0, 2.0, 3.0])]
    first, second = step(gather(sparse(top_k(0.25))), inputs.__getitem__, 2)
    assert first.mean.tolist() == second.mean.tolist() == [4.0, -3.0, 0.0, 0.0]
    assert first.unsent.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.unsent.tolist() == [1.0, 0.0, 2.0, 3.0]


def test_choices_that_coincide_add_up() -> None:
    for result in step(gather(sparse(top_k(0.5))), lambda rank: torch.tensor([4.0 * rank + 4.0, 0.0]), 4):
        assert result.mean.tolist() == [10.0, 0.0]
