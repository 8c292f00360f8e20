"""Regions, their owners, and what everybody sends and keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.select.topk import top_k
from gradwire.comm import Round
from gradwire.contrib.oktopk import ok_topk
from gradwire.contrib.randomk import random_k
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step

WORLDS = (1, 2, 3, 4, 5)


def integers(rank: int, size: int = 60) -> Tensor:
    """Both signs, ties, and a drift that makes regions uneven."""
    random = torch.Generator().manual_seed(rank)
    drift = torch.arange(size) // (10 + 5 * rank)
    return (torch.randint(-9, 10, (size,), generator=random) * (1 + drift)).float()


def largest(candidates: list[int], values: dict[int, np.float32] | list[float], count: int) -> list[int]:
    """Ties to the lowest place."""
    return sorted(sorted(candidates, key=lambda place: (-abs(values[place]), place))[:count])


@dataclass(frozen=True)
class Simulated:
    """What a brute-force run found, in float32 and rank order, so that even ties fall alike."""

    mean: dict[int, np.float32]  # by final place
    sent: list[list[int]]  # by rank


def simulate(inputs: list[Tensor], count: int, slack: float) -> Simulated:
    world, numel = len(inputs), inputs[0].numel()
    lists = [x.tolist() for x in inputs]
    chosen = [largest(list(range(numel)), x, count) for x in lists]
    starts = [sum(mine[j * count // world] for mine in chosen) // world for j in range(1, world)]
    capacity = min(count, math.ceil(slack * count / world))
    mean: dict[int, np.float32] = {}
    sent: list[list[int]] = [[] for _ in inputs]
    for start, stop in pairwise([0, *starts, numel]):
        region = {place: np.float32(0) for place in range(start, stop)}
        for rank, mine in enumerate(chosen):
            inside = [place for place in mine if start <= place < stop]
            for place in largest(inside, lists[rank], capacity):
                region[place] += np.float32(lists[rank][place]) * np.float32(1 / world)
                sent[rank].append(place)
        mean |= {place: region[place] for place in largest(list(region), region, -(-count // world))}
    return Simulated(mean, sent)


@looped("world", [*WORLDS, 7])
@looped("ratio", [0.02, 0.1, 0.35, 1.0])
@looped("slack", [1.0, 1.5, 2.0])
def test_equals_brute_force(world: int, ratio: float, slack: float) -> None:
    inputs = [integers(rank) for rank in range(world)]
    expected = simulate(inputs, round(ratio * 60), slack)
    mean = torch.zeros(60)
    for place, value in expected.mean.items():
        mean[place] = float(value)
    for rank, result in enumerate(step(ok_topk(top_k(ratio), slack), inputs.__getitem__, world)):
        unsent = inputs[rank].clone()
        unsent[[place for place in expected.sent[rank] if place in expected.mean]] = 0.0
        assert torch.equal(result.unsent, unsent)
        assert torch.equal(result.mean, mean)


def test_by_hand() -> None:
    # Two of eight on two ranks. Second chosen places 1 and 7: the second region starts at (1 + 7) // 2 = 4.
    # Region 0…3: 8 (rank 0, place 0), 6 - 2 (place 1: rank 1 has not chosen its -2); one is kept, place 0.
    # Region 4…7: 5 (place 6) and 9 (place 7), both of rank 1; one is kept, place 7.
    inputs = [torch.tensor([8.0, 6, 0, 0, 1, 0, 0, 1]), torch.tensor([0.0, -2, 0, 0, 0, 0, 5, 9])]
    first, second = step(ok_topk(top_k(0.25)), inputs.__getitem__, 2)
    assert first.mean.tolist() == second.mean.tolist() == [4.0, 0, 0, 0, 0, 0, 0, 4.5]
    assert first.unsent.tolist() == [0.0, 6, 0, 0, 1, 0, 0, 1]
    assert second.unsent.tolist() == [0.0, -2, 0, 0, 0, 0, 5, 0]


def test_what_does_not_fit_stays() -> None:
    # Four of eight on two ranks, all of rank 0's in the first half, which has room for two at slack 1.
    inputs = [torch.tensor([4.0, 3, 2, 1, 0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 0, 1, 2, 3, 4])]
    first, second = step(ok_topk(top_k(0.5), slack=1.0), inputs.__getitem__, 2)
    assert first.mean.tolist() == [2.0, 1.5, 0, 0, 0, 0, 1.5, 2.0]
    assert first.unsent.tolist() == [0.0, 0, 2, 1, 0, 0, 0, 0]
    assert second.unsent.tolist() == [0.0, 0, 0, 0, 1, 2, 0, 0]


def test_elements_that_several_ranks_send_add_up_in_one_place() -> None:
    x = torch.zeros(100)
    x[40:44] = 8.0
    for result in step(ok_topk(top_k(0.04), slack=4.0), lambda rank: x * (rank + 1), 4):
        assert torch.equal(result.mean, x * 2.5)
        assert not result.unsent.any()


@looped("world", [2, 3, 4, 8, 16, 32, 64])
@looped("numel", [1_000_000, 25_000_000])
def test_traffic_is_below_six_k_words(world: int, numel: int) -> None:
    rounds = ok_topk(top_k(0.01)).rounds(numel, torch.float32, ExchangeContext(0, 0, 0, world))
    words, count = sum(each.wire_bytes(world) for each in rounds) / 4, numel // 100
    assert words < 6 * count
    # The formula of the docstring, and per message a word of padding where words are odd.
    others = world - 1
    formula = others * (4 + 1 + 2 * math.ceil(2 * count / world) + 1 + 2 * math.ceil(count / world))
    assert formula <= words <= formula + 2 * others


def test_rounds_of_a_small_unit() -> None:
    assert ok_topk(top_k(0.1)).rounds(100, torch.float16, ExchangeContext(0, 0, 0, 5)) == (
        Round("all_reduce", 5, torch.int64),
        Round("all_to_all", 5 * (24 + 8), torch.uint8),  # a count, 4 places, padding; 4 values
        Round("all_gather", 16 + 4, torch.uint8),  # a count, 2 places, padding; 2 values
    )


def test_nan_travels_and_stays_in_its_place() -> None:
    inputs = [integers(rank) for rank in range(3)]
    inputs[2][17] = torch.nan
    for result in step(ok_topk(top_k(0.1)), inputs.__getitem__, 3):
        assert result.mean.isnan().nonzero().tolist() == [[17]]
        assert result.unsent.isfinite().all()


@looped("slack", [0.5, 0.0, math.nan, math.inf])
def test_slack_that_leaves_no_room_raises(slack: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ok_topk(top_k(0.1), slack)


def test_any_selector_will_do() -> None:
    inputs = [integers(rank) for rank in range(4)]
    # All ranks choose the same, so that regions are even and everything fits.
    for rank, result in enumerate(step(ok_topk(random_k(0.2)), inputs.__getitem__, 4)):
        gone = result.unsent != inputs[rank]
        assert torch.equal(result.mean[gone], torch.stack(inputs).mean(0)[gone])
