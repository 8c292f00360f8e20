"""Passes with a threshold, and the sample that guesses it, against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels.draws import stratified_indices
from gradwire.kernels.threshold import indices_reaching, moments_reaching
from tests.support.inputs import FINITE, KINDS, normal
from tests.support.looped import looped

Kind = Callable[[int], Tensor]
SIZES = (0, 1, 2, 31, 32, 33, 1023, 1024, 1025, 40_009)
THRESHOLDS = (0.0, 1e-45, 1e-40, 0.1, 1.0, 2.5, 1e30, torch.finfo(torch.float32).max, torch.inf)
every_kind = looped("kind", KINDS)
every_size = looped("n", SIZES)


@every_kind
@every_size
def test_same_indices_as_the_reference_whatever_the_capacity(kind: Kind, n: int) -> None:
    x = kind(n)
    for threshold in THRESHOLDS:
        count = indices_reaching.plain(x, threshold, n).numel()
        for capacity in {0, 1, n // 3, max(count - 1, 0), count, count + 1, n, 2 * n}:
            found = indices_reaching(x, threshold, capacity)
            assert torch.equal(found, indices_reaching.plain(x, threshold, capacity)), (
                threshold,
                capacity,
            )
            assert found.numel() == min(count, capacity + 1)


@looped("threshold", [-1e-9, -torch.inf, torch.nan])
def test_threshold_that_is_no_magnitude_raises(threshold: float) -> None:
    for use in (
        lambda: indices_reaching(normal(9), threshold, 9),
        lambda: moments_reaching(normal(9), threshold),
    ):
        with pytest.raises(ValueError, match="is not 0 or more"):
            use()


def test_negative_capacity_raises() -> None:
    with pytest.raises(ValueError, match="capacity=-1"):
        indices_reaching(normal(9), 0.0, -1)


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_threshold_is_rounded_to_the_type_of_the_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, -0.1, 0.09], dtype=dtype)
    assert indices_reaching(x, 0.1, 3).tolist() == [0, 1]
    assert moments_reaching(x, 0.1).number == 2
    assert indices_reaching(x, -0.0, 3).numel() == 3


@looped("kind", FINITE)
@every_size
def test_sums_are_those_of_the_reference(kind: Kind, n: int) -> None:
    x = kind(n)
    for threshold in THRESHOLDS:
        number, *sums = moments_reaching(x, threshold)
        expected, *reference_sums = moments_reaching.plain(x, threshold)
        assert number == expected
        # Either sum of n positive numbers errs by a relative n·2^-53 at most.
        assert sums == pytest.approx(reference_sums, rel=2 * n * 2.0**-53, abs=0.0)


@looped("value", [torch.nan, torch.inf, -torch.inf])
@every_size
def test_sums_show_one_element_that_is_not_finite(value: float, n: int) -> None:
    for place in {0, n // 2, n - 1} if n else ():
        x = normal(n)
        x[place] = value
        for threshold in THRESHOLDS:
            found = moments_reaching(x, threshold)
            assert found.number == moments_reaching.plain(x, threshold)[0]
            assert not torch.tensor([found.total, found.squares]).isfinite().any()


def test_strided_views_take_the_reference_path_and_nothing_is_written() -> None:
    x = normal(4000)
    before = x.clone()
    assert torch.equal(indices_reaching(x[::2], 1.0, 2000), indices_reaching(x[::2].clone(), 1.0, 2000))
    assert moments_reaching(x[::2], 1.0).number == moments_reaching(x[::2].clone(), 1.0).number
    assert torch.equal(x, before)


@looped(("n", "size"), [(0, 0), (1, 0), (1, 1), (7, 7), (1000, 3), (4097, 4096), (40_009, 500)])
def test_sample_holds_one_of_each_stretch_and_is_that_of_the_reference(n: int, size: int) -> None:
    for seed in (0, 1, 2**62 - 1):
        drawn = stratified_indices(n, size, seed)
        assert torch.equal(drawn, stratified_indices.plain(n, size, seed))
        for j, index in enumerate(drawn.tolist()):
            assert j * n // size <= index < (j + 1) * n // size


def test_each_index_is_drawn_equally_often() -> None:
    # Counts of D independent draws with probability p have standard deviation √(D·p·(1-p)).
    draws, n, size = 4000, 60, 10
    p, counts = size / n, torch.zeros(n)
    for seed in range(draws):
        counts[stratified_indices(n, size, 7919 * seed)] += 1
    assert ((counts - draws * p).abs() <= 4 * (draws * p * (1 - p)) ** 0.5).all()


@looped(("n", "size"), [(3, 4), (3, -1)])
def test_sample_larger_than_all_raises(n: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"size={size} is outside"):
        stratified_indices(n, size, 0)
