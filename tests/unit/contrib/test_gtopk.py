"""The tree, what it elects, and what everybody sends and keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.indices import index_words
from gradwire.comm import Round
from gradwire.contrib.gtopk import gtop_k
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step

WORLDS = (1, 2, 3, 4, 5)
Sparse = dict[int, np.float32]


def integers(rank: int, size: int = 60) -> Tensor:
    """A few large ones at places of the rank's own and at shared ones, of both signs."""
    random = torch.Generator().manual_seed(rank)
    return torch.randint(-40, 41, (size,), generator=random) * (torch.arange(size) % 3 != rank % 3).float()


def largest(sums: Sparse, count: int) -> Sparse:
    """Ties to the lowest place."""
    order = sorted(sums, key=lambda place: (-abs(sums[place]), place))
    return {place: sums[place] for place in sorted(order[:count])}


def elected(inputs: list[Tensor], count: int) -> list[int]:
    """The tree in plain Python: lists[r] is what rank r holds; in round j rank r + 2^j is merged into r.

    In float32, so that even ties fall alike.
    """
    weight = np.float32(1 / len(inputs))
    lists = [largest(dict(enumerate(weight * x.numpy())), count) for x in inputs]
    by = 1
    while by < len(lists):
        for rank in range(0, len(lists) - by, 2 * by):
            both = dict(lists[rank])
            for place, value in lists[rank + by].items():
                both[place] = both.get(place, np.float32(0)) + value
            lists[rank] = largest(both, count)
        by *= 2
    return list(lists[0])


@looped("world", [*WORLDS, 7, 8])
@looped("ratio", [0.02, 0.1, 0.5, 1.0])
def test_equals_the_tree_in_plain_python(world: int, ratio: float) -> None:
    inputs = [integers(rank) for rank in range(world)]
    final = elected(inputs, round(ratio * 60))
    total = torch.zeros(60)
    for x in inputs:
        total += x * (1.0 / world)
    for rank, result in enumerate(step(gtop_k(ratio), inputs.__getitem__, world)):
        mean, unsent = torch.zeros(60), inputs[rank].clone()
        mean[final] = total[final]
        unsent[final] = 0.0
        assert torch.equal(result.unsent, unsent)
        assert torch.equal(result.mean, mean)


def test_what_one_branch_drops_and_another_brings_through_is_not_lost() -> None:
    # k = 1. Ranks 0 and 1: place 0 (7) beats place 1 (5), so rank 1's 5 is dropped there; ranks 2 and 3
    # bring place 1 through with 4 + 4 = 8. The paper's mean would be 8/4, and rank 1's 5 nowhere.
    inputs = torch.tensor([[7.0, 0, 0], [0, 5, 0], [0, 4, 0], [1, 4, 3]])
    for rank, result in enumerate(step(gtop_k(0.3), inputs.__getitem__, 4)):
        assert result.mean.tolist() == [0.0, 13 / 4, 0.0]
        assert result.unsent.tolist() == [inputs[rank, 0], 0.0, inputs[rank, 2]]


@looped("world", [1, 2, 3, 4, 5, 8, 9, 64])
def test_rounds_are_log_n_shifts_and_two_all_reduces(world: int) -> None:
    numel, count = 100_000, 1000
    rounds = gtop_k(0.01).rounds(numel, torch.float32, ExchangeContext(0, 0, 0, world))
    depth = math.ceil(math.log2(world))
    words = index_words(count, numel)
    size = -(-4 * words // 8) * 8 + 4 * count
    assert rounds == (
        *(Round("shift", size, torch.uint8, -(2**j)) for j in range(depth)),
        Round("all_reduce", words, torch.int32),
        Round("all_reduce", count, torch.float32),
    )
    sent = sum(each.wire_bytes(world) for each in rounds)
    assert sent == pytest.approx(depth * size + 2 * (world - 1) / world * 4 * (words + count))


def test_no_rank_keeps_more_than_it_had() -> None:
    inputs = [integers(rank) for rank in range(5)]
    for rank, result in enumerate(step(gtop_k(0.1), inputs.__getitem__, 5)):
        assert ((result.unsent == inputs[rank]) | (result.unsent == 0)).all()


def test_nan_is_elected_and_stays_in_its_place() -> None:
    inputs = [integers(rank) for rank in range(3)]
    inputs[2][17] = torch.nan
    for result in step(gtop_k(0.1), inputs.__getitem__, 3):
        assert result.mean.isnan().nonzero().tolist() == [[17]]
        assert result.unsent.isfinite().all()


def test_ratio_outside_its_range_raises() -> None:
    with pytest.raises(ValueError, match=r"outside \(0, 1\]"):
        gtop_k(0.0)
