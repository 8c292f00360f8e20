"""Exact top-k against the reference, where thresholds, samples and buffers can go wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels.cpu import topk as cpu
from gradwire.kernels.topk import topk_indices
from tests.support.inputs import CHOICES, drawn, generator, normal
from tests.support.looped import looped

SIZES = (0, 1, 2, 4095, 4096, 4097, 40_000, 100_003)


@looped("n", SIZES)
@looped("kind", CHOICES)
def test_same_indices_as_the_reference(kind: Callable[[int], Tensor], n: int) -> None:
    x, few = kind(n), {min(each, n) for each in (0, 1, 37, 4097)}
    for k in sorted({*few, n // 100, n // 10, max(n // 2 - 1, 0), n // 2, n}):
        assert torch.equal(topk_indices(x, k), topk_indices.plain(x, k)), f"k={k}"


@looped("above", [True, False])
def test_guess_that_fails_is_repaired(above: bool) -> None:
    # Large where the sample looks and nowhere else: too few elements reach the guess. The other way
    # round it is far too low, and the room for candidates fills up again and again.
    n = 4 * cpu.SAMPLE
    sampled = torch.zeros(n, dtype=torch.bool)
    sampled[drawn(n)] = True
    x = torch.where(sampled == above, 2.0, 1.0) + torch.arange(n) / (2.0 * n)
    k = n // 8
    guess = cpu._guess(x.numpy(), k)
    reached = int((x.view(torch.int32) >= int(guess)).sum())
    assert reached < k if above else reached > n - cpu.SAMPLE
    for k in (1, n // 100, n // 8):
        assert torch.equal(topk_indices(x, k), topk_indices.plain(x, k))


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    x = normal(40_000).to(dtype)
    assert torch.equal(topk_indices(x, 400), topk_indices.plain(x, 400))


def test_strided_view_takes_the_reference_path() -> None:
    x = normal(80_000)
    assert torch.equal(topk_indices(x[::2], 400), topk_indices(x[::2].clone(), 400))


def test_input_is_only_read() -> None:
    x = normal(40_000)
    before = x.clone()
    topk_indices(x, 400)
    assert torch.equal(x, before)


@looped("k", [-1, 11])
def test_k_outside_the_range_raises(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k={k} is outside 0 … 10"):
        topk_indices(torch.zeros(10), k)


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.lists(floats, max_size=60))
def test_any_short_list(data: st.DataObject, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    k = data.draw(st.integers(0, len(numbers)))
    assert topk_indices(x, k).tolist() == topk_indices.plain(x, k).tolist()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(floats, min_size=1, max_size=12),
    st.integers(2 * cpu.SAMPLE + 1, 3 * cpu.SAMPLE),
    st.floats(0.0, 0.6),
)
def test_any_few_values_repeated_beyond_the_sampling_threshold(
    numbers: list[float], n: int, share: float
) -> None:
    pattern = torch.tensor(numbers, dtype=torch.float32)
    x = pattern[torch.randint(len(numbers), (n,), generator=generator(n))]
    k = int(share * n)
    assert torch.equal(topk_indices(x, k), topk_indices.plain(x, k))
