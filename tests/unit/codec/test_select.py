"""Which elements travel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.codec.select.base import Selector, count_kept
from gradwire.codec.select.topk import top_k
from gradwire.contrib.randomk import random_k
from gradwire.step.context import ExchangeContext
from tests.support.whole import everything

AT = ExchangeContext(step=4, unit=1, rank=0, world=3)


@pytest.mark.parametrize(
    ("ratio", "numel", "count"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 49, 1), (0.01, 1000, 10), (0.5, 7, 4), (1.0, 7, 7), (1e-9, 10**6, 1)],
)
def test_count(ratio: float, numel: int, count: int) -> None:
    assert count_kept(ratio, numel) == count


@pytest.mark.parametrize("selector", [top_k(0.1), random_k(0.1), everything(), top_k(1.0), random_k(1.0)])
@pytest.mark.parametrize("numel", [0, 1, 2, 127, 4097, 40_000])
def test_indices_are_as_many_as_announced_ascending_and_in_range(selector: Selector, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    indices = selector.select(x, AT)
    assert indices.dtype == torch.int64
    assert indices.shape == (selector.count(numel, AT),)
    assert (indices.diff() > 0).all()
    assert all(0 <= index < numel for index in indices.tolist())


@pytest.mark.parametrize("selector", [random_k(0.1), everything()])
def test_shared_selectors_look_neither_at_the_rank_nor_at_the_values(selector: Selector) -> None:
    assert selector.laws.shared
    one = selector.select(torch.zeros(500), AT)
    other = selector.select(torch.randn(500), replace(AT, rank=2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("field", ["step", "unit", "seed", "lane"])
def test_random_choice_changes_with_time_and_place(field: str) -> None:
    x, later = torch.zeros(500), replace(AT, **{field: 9})
    assert not torch.equal(random_k(0.1).select(x, AT), random_k(0.1).select(x, later))


def test_top_k_takes_the_largest_magnitudes_and_the_first_of_equals() -> None:
    x = torch.tensor([1.0, -5.0, 2.0, -2.0, 0.0, 5.0, 2.0, 0.5])
    assert top_k(0.5).select(x, AT).tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("make", [top_k, random_k])
@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan")])
def test_ratio_outside_its_range_raises(make, ratio: float) -> None:
    with pytest.raises(ValueError, match=r"outside \(0, 1\]"):
        make(ratio)
