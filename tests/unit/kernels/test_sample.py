"""Sampling without replacement against the reference, and against chance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels.draws import sample_indices
from tests.support.looped import looped


@looped("n", [0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 40_000, 100_003])
def test_same_indices_as_the_reference(n: int) -> None:
    for k in sorted({0, min(1, n), n // 100, n // 2, n}):
        for seed in (0, 1, 2**62 - 1):
            assert torch.equal(sample_indices(n, k, seed), sample_indices.plain(n, k, seed))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 200), st.integers(0, 2**62 - 1))
def test_any_draw_is_ascending_without_repeats_and_that_of_the_reference(
    data: st.DataObject, n: int, seed: int
) -> None:
    k = data.draw(st.integers(0, n))
    drawn = sample_indices(n, k, seed).tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == k
    assert all(0 <= index < n for index in drawn)
    assert drawn == sample_indices.plain(n, k, seed).tolist()


@looped(("n", "k"), [(40, 1), (40, 10), (65, 32), (40, 39)])
def test_each_index_is_drawn_equally_often(n: int, k: int) -> None:
    # An index is in a draw with probability p = k/n; over D independent draws its count has standard
    # deviation √(D·p·(1-p)). Seeds are fixed, so this passes or fails for good.
    draws, p = 4000, k / n
    counts = torch.zeros(n)
    for seed in range(draws):
        counts[sample_indices(n, k, seed)] += 1
    assert ((counts - draws * p).abs() <= 4 * (draws * p * (1 - p)) ** 0.5).all()


def test_pairs_are_drawn_equally_often() -> None:
    # Every pair of 6 indices is in a draw of 3 with probability 3·2/(6·5); counts as above.
    n, k, draws, p = 6, 3, 6000, 0.2
    together = torch.zeros(n, n)
    for seed in range(draws):
        drawn = sample_indices(n, k, seed)
        together[drawn[:, None], drawn[None, :]] += 1
    pairs = together[~torch.eye(n, dtype=torch.bool)]
    assert ((pairs - draws * p).abs() <= 4 * (draws * p * (1 - p)) ** 0.5).all()


def test_seeds_differ() -> None:
    assert not torch.equal(sample_indices(10_000, 100, 1), sample_indices(10_000, 100, 2))


@looped(("n", "k"), [(3, 4), (3, -1)])
def test_k_outside_the_range_raises(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} is outside"):
        sample_indices(n, k, 0)
