"""Filling up, and exactly k from any threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codec.select.threshold import exactly, fill_up, fill_up_from, largest_of
from gradwire.kernels.topk import topk_indices
from gradwire.unit.context import ExchangeContext
from tests.support.inputs import FINITE, KINDS
from tests.support.looped import looped

AT = ExchangeContext(step=2, unit=1, rank=0, world=3)


def filled_slowly(start: int, indices: Tensor, k: int, numel: int) -> list[int]:
    free = [place for place in range(numel) if place not in set(indices.tolist())]
    return sorted(indices.tolist() + (free + free)[start : start + k - indices.numel()])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 40))
def test_free_places_are_taken_in_turn(data: st.DataObject, numel: int) -> None:
    chosen = data.draw(
        st.sets(st.integers(0, max(numel - 1, 0)), max_size=numel) if numel else st.just(set())
    )
    indices = torch.tensor(sorted(chosen), dtype=torch.int64)
    k = data.draw(st.integers(len(chosen), numel))
    start = data.draw(st.integers(0, max(numel - len(chosen) - 1, 0)))
    assert fill_up_from(start, indices, k, numel).tolist() == filled_slowly(start, indices, k, numel)


@looped(("k", "start"), [(1, 0), (11, 0), (5, 8), (5, -1)])
def test_more_or_fewer_than_there_are_raise(k: int, start: int) -> None:
    with pytest.raises(ValueError, match=f"2 indices and 10 places from {start} on do not give k={k}"):
        fill_up_from(start, torch.tensor([0, 7]), k, 10)


@looped("kind", KINDS)
@looped("n", [1, 2, 100, 40_009])
def test_the_largest_that_reach_a_threshold_are_chosen_and_the_rest_is_filled(kind, n: int) -> None:
    x = kind(n)
    ordered = x.abs().masked_fill(x.isnan(), torch.inf).sort(descending=True).values
    for k in {0, 1, n // 100, n // 3, n}:
        for reached in {0, k // 3, k // 2, k, min(2 * k, n), min(3 * k + 1, n), n}:
            threshold = float(ordered[reached - 1]) if reached else torch.inf
            found = int((~(x.abs() < threshold)).sum())
            indices = exactly(x, threshold, k, AT)
            assert indices.numel() == k
            assert (indices.diff() > 0).all()
            if found >= k or 2 * found < k:
                assert torch.equal(indices, topk_indices(x, k))
            else:
                assert set(topk_indices(x, found).tolist()) <= set(indices.tolist())


def test_all_free_places_are_equally_likely_to_fill() -> None:
    indices, counts = torch.tensor([3, 4, 9]), torch.zeros(10, dtype=torch.int64)
    for step in range(700):
        counts[fill_up(indices, 5, 10, replace(AT, step=step))] += 1
    assert counts[indices].tolist() == [700] * 3
    # 200 of 700 each, with a standard deviation of 12.
    assert all(150 < count < 250 for place, count in enumerate(counts.tolist()) if place not in (3, 4, 9))


@looped("kind", FINITE)
def test_contraction_is_that_of_as_many_as_reached_the_threshold(kind) -> None:
    n, k = 4097, 400
    x = kind(n)
    ordered = x.double().abs().sort(descending=True).values
    total = ordered.square().sum()
    for reached in (200, 250, 399, 400, 500):
        rest = x.double()
        rest[exactly(x, float(ordered[reached - 1]), k, AT)] = 0.0
        assert rest.square().sum() <= (1 - min(reached, k) / n) * total * (1 + 1e-11)


def test_largest_of_some_keeps_them_in_order() -> None:
    x = torch.tensor([9.0, -3.0, 1.0, 3.0, torch.nan])
    assert largest_of(x, torch.tensor([1, 2, 3, 4]), 2).tolist() == [1, 4]
    assert largest_of(x, torch.tensor([1, 2]), 5).tolist() == [1, 2]


@looped("kind", FINITE)
def test_contraction_is_that_of_k_in_the_mean(kind) -> None:
    n, k, found = 12, 6, 4
    x = kind(n)
    indices = topk_indices(x, found)
    total, lefts = x.double().square().sum(), []
    for start in range(n - found):  # every one that can be drawn
        rest = x.double()
        rest[fill_up_from(start, indices, k, n)] = 0.0
        lefts.append(rest.square().sum())
    assert sum(lefts) / len(lefts) <= (1 - k / n) * total * (1 + 1e-11)
