"""Exact top-k against the reference, where thresholds, samples and buffers can go wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels import reference, topk_indices
from gradwire.kernels.cpu import topk as cpu

SIZES = (0, 1, 2, 4095, 4096, 4097, 40_000, 100_003)


def generator(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=generator(n))


def ties(n: int) -> Tensor:
    return torch.randint(-3, 4, (n,), generator=generator(n)).float()


def constant(n: int) -> Tensor:
    return torch.full((n,), -0.5)


def zeros(n: int) -> Tensor:
    return torch.zeros(n) * normal(n).sign()  # zeros of both signs


def half_zeros(n: int) -> Tensor:
    return normal(n) * (torch.rand(n, generator=generator(n)) < 0.5)


def heavy_tail(n: int) -> Tensor:
    return normal(n) / torch.rand(n, generator=generator(n + 1)).clamp_min(1e-12) ** 2


def subnormal(n: int) -> Tensor:
    return normal(n) * 1e-40


def sorted_down(n: int) -> Tensor:
    return torch.arange(n, 0, -1).float()


def columns(n: int) -> Tensor:
    """Rows of 64 with one large column: what a stride of a power of two would miss or hit always."""
    x = normal(n)
    x[::64] *= 1e3
    return x


def special(n: int) -> Tensor:
    x = normal(n)
    x[torch.rand(n, generator=generator(n)) < 0.02] = float("nan")
    x[torch.rand(n, generator=generator(n + 1)) < 0.02] = -float("inf")
    x[torch.rand(n, generator=generator(n + 2)) < 0.02] = torch.finfo(torch.float32).max
    return x


def mostly_nan(n: int) -> Tensor:
    x = torch.full((n,), float("nan"))
    x[::3] = float("inf")
    x[::5] = 1.0
    return x


KINDS = (
    normal, ties, constant, zeros, half_zeros, heavy_tail, subnormal, sorted_down, columns, special,
    mostly_nan,
)  # fmt: skip


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_indices_as_the_reference(kind: Callable[[int], Tensor], n: int) -> None:
    x = kind(n)
    for k in sorted({0, min(1, n), n // 100, n // 10, max(n // 2 - 1, 0), n // 2, n}):
        assert torch.equal(topk_indices(x, k), reference.topk_indices(x, k)), f"k={k}"


def test_guess_that_fails_is_repaired() -> None:
    # Large where the sample looks and nowhere else: too few elements reach the guess. The other way
    # round it is far too low, and the buffer overflows. Both end in a look at everything.
    n = 4 * cpu.SAMPLE
    stride = n // cpu.SAMPLE | 1
    sampled = torch.zeros(n, dtype=torch.bool)
    sampled[::stride] = True
    for large in (sampled, ~sampled):
        x = torch.where(large, 2.0, 1.0) + torch.arange(n) / (2.0 * n)
        assert cpu._candidates(x.numpy().view("int32"), n // 4).size == n
        for k in (1, n // 100, n // 4):
            assert torch.equal(topk_indices(x, k), reference.topk_indices(x, k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    x = normal(40_000).to(dtype)
    assert torch.equal(topk_indices(x, 400), reference.topk_indices(x, 400))


def test_strided_view_takes_the_reference_path() -> None:
    x = normal(80_000)
    assert torch.equal(topk_indices(x[::2], 400), topk_indices(x[::2].clone(), 400))


def test_input_is_only_read() -> None:
    x = normal(40_000)
    before = x.clone()
    topk_indices(x, 400)
    assert torch.equal(x, before)


@pytest.mark.parametrize("k", [-1, 11])
def test_k_outside_the_range_raises(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k={k} is outside 0 … 10"):
        topk_indices(torch.zeros(10), k)


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.lists(floats, max_size=60))
def test_any_short_list(data: st.DataObject, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    k = data.draw(st.integers(0, len(numbers)))
    assert topk_indices(x, k).tolist() == reference.topk_indices(x, k).tolist()


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
    assert torch.equal(topk_indices(x, k), reference.topk_indices(x, k))
