"""What is too large to be remembered, and what is no number at all."""

from __future__ import annotations

import pytest
import torch

from gradwire.kernels import slices
from gradwire.kernels.compensation import compensate, compensate_momentum
from gradwire.kernels.pieces import Pieces
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM, is_finite
from tests.support.looped import looped

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BELOW = 1 - torch.finfo(torch.float32).eps


@looped("dtype", TYPES)
@looped("bad", [torch.nan, torch.inf, -torch.inf])
@looped("place", [0, 50, 100])
def test_one_element_that_is_not_finite_is_seen(dtype: torch.dtype, bad: float, place: int) -> None:
    x = torch.ones(101, dtype=dtype)
    assert is_finite(x)
    x[place] = bad
    assert not is_finite(x)


@looped("dtype", TYPES)
def test_finite_numbers_whose_sum_is_not_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((100,), largest, dtype=dtype))
    assert not is_finite(torch.tensor([largest, largest, torch.nan], dtype=dtype))
    assert not is_finite(torch.tensor([torch.inf, -torch.inf], dtype=dtype))


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.empty(0, 4))


@looped("dtype", [torch.float32, torch.float64])
@looped("scale", [1.0, 0.25])
def test_a_memory_takes_gradients_up_to_a_bound(dtype: torch.dtype, scale: float) -> None:
    memory, grad = torch.zeros(5000, dtype=dtype), torch.zeros(5000, dtype=dtype)
    grad[4321] = -LARGEST_GRADIENT / scale
    assert not compensate(torch.empty_like(memory), memory, grad, 1.0, scale).finite
    assert compensate(torch.empty_like(memory), memory, grad * BELOW, 1.0, scale).finite
    assert compensate(torch.empty_like(memory), None, grad, 1.0, scale).finite, "nothing is remembered"


@looped("dtype", [torch.float32, torch.float64])
def test_a_memory_takes_sums_up_to_a_bound(dtype: torch.dtype) -> None:
    memory, grad = torch.zeros(5000, dtype=dtype), torch.zeros(5000, dtype=dtype)
    memory[4321] = LARGEST_SUM
    assert not compensate(torch.empty_like(memory), memory, grad, 1.0).finite
    assert compensate(torch.empty_like(memory), memory, grad, 0.5).finite
    assert compensate(torch.empty_like(memory), memory * BELOW, grad, 1.0).finite


@looped("threads", [1, 3])
@looped("dtype", [torch.float32, torch.float64])
def test_under_momentum_too_with_each_pieces_own_scale(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "free_threads", lambda: threads)
    monkeypatch.setattr(slices, "SMALLEST", 1000)
    pieces = Pieces([(0, 0, 1500), (1500, 1500, 3500)])
    planes, grad = torch.zeros(2, 5000, dtype=dtype), torch.zeros(5000, dtype=dtype)
    grad[2000] = LARGEST_GRADIENT

    def is_taken(*scales: float) -> bool:
        out = torch.empty_like(planes)
        return compensate_momentum((out[0], out[1]), (planes[0], planes[1]), grad, 0.9, scales, pieces).finite

    assert not is_taken(0.5, 1.0)
    assert is_taken(1.0, 0.5)
    planes[0, 4000] = LARGEST_SUM
    assert not is_taken(1.0, 0.5)
