"""A threshold that is read off what the last step left."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradwire.codec.select.threshold import reused_threshold
from gradwire.codec.select.topk import top_k
from gradwire.kernels.topk import topk_indices
from gradwire.unit.context import ExchangeContext

AT = ExchangeContext(step=3, unit=0, rank=0, world=1)
SIZE, K = 20_000, 200


def gradient(step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(step))


def test_without_a_memory_the_choice_is_exact() -> None:
    x = gradient(0)
    for ctx in (AT, replace(AT, unsent=torch.zeros(SIZE))):
        assert torch.equal(reused_threshold(0.01).select(x, ctx), topk_indices(x, K))


def test_what_reaches_the_largest_left_is_chosen_and_the_room_filled() -> None:
    x = torch.tensor([0.1, 9.0, 0.2, -7.0, 0.3, 5.0, 0.0, 4.0])
    ctx = replace(AT, unsent=torch.tensor([0.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    chosen = reused_threshold(0.5).select(x, ctx).tolist()
    assert len(chosen) == 4
    assert {1, 3} < set(chosen)
    low = replace(AT, unsent=torch.full((8,), 0.25))
    assert reused_threshold(0.25).select(x, low).tolist() == [1, 3]


def test_the_threshold_follows_the_gradient_without_being_told() -> None:
    selector, memory, shares = reused_threshold(0.01), torch.zeros(SIZE), []
    for step in range(60):
        # The scale drops to a tenth half way.
        x = memory + gradient(step) * (1.0 if step < 30 else 0.1)
        chosen = selector.select(x, replace(AT, unsent=memory))
        best = top_k(0.01).select(x, AT)
        shares.append(float(x[chosen].square().sum() / x[best].square().sum()))
        memory = x.index_fill(0, chosen, 0.0)
    assert all(0.5 <= share <= 1.0 + 1e-5 for share in shares)
    assert sum(shares) / len(shares) > 0.9
