"""Selections that take what they choose, with and without a fold before, against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels import feedback_topk, reference, take_topk
from gradwire.kernels.cpu.topk import SAMPLE
from tests.support.inputs import CHOICES, drawn, generator, normal
from tests.support.looped import looped

SIZES = (0, 1, 2, 4095, 4096, 4097, 100_003)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32)) or torch.allclose(
        left, right, rtol=0.0, atol=0.0, equal_nan=True
    )


def counts(n: int) -> list[int]:
    return sorted({0, min(1, n), n // 100, n // 10, n // 2, n})


@looped("n", SIZES)
@pytest.mark.parametrize("kind", CHOICES, ids=lambda kind: kind.__name__)
def test_take_topk_as_the_reference(kind: Callable[[int], Tensor], n: int) -> None:
    for k in counts(n):
        fast, slow = kind(n), kind(n)
        indices, values = take_topk(fast, k, 0.25)
        expected_indices, expected_values = reference.take_topk(slow, k, 0.25)
        assert torch.equal(indices, expected_indices), f"k={k}"
        assert same(values, expected_values), f"k={k}"
        assert same(fast, slow), f"k={k}"


@looped("n", SIZES)
@pytest.mark.parametrize("kind", CHOICES, ids=lambda kind: kind.__name__)
def test_feedback_topk_as_the_reference(kind: Callable[[int], Tensor], n: int) -> None:
    # Half the memory is the gradient's negative, so that sums of zero and of NaN (Inf - Inf) occur.
    grad = kind(n)
    opposite = torch.rand(n, generator=generator(n + 3)) < 0.5
    for k in counts(n):
        fast = torch.where(opposite, -grad, kind(n).flip(0))
        slow, before = fast.clone(), grad.clone()
        indices, values = feedback_topk(fast, grad, k)
        expected_indices, expected_values = reference.feedback_topk(slow, grad, k)
        assert torch.equal(indices, expected_indices), f"k={k}"
        assert same(values, expected_values), f"k={k}"
        assert same(fast, slow), f"k={k}"
        assert same(grad, before), "the gradient is only read"


def test_nothing_is_lost_over_many_steps() -> None:
    # Small integers: every sum is exact.
    memory, came, sent = torch.zeros(10_007), torch.zeros(10_007), torch.zeros(10_007)
    for step in range(50):
        grad = torch.randint(-5, 6, memory.shape, generator=generator(step)).float()
        came += grad
        indices, values = feedback_topk(memory, grad, 100)
        sent[indices] += values
        assert torch.equal(came, sent + memory)


def test_fold_happens_once_when_the_guess_fails() -> None:
    # Large where the sample looks and nowhere else: fewer than k sums reach the guess, and a second pass
    # over them must not add the gradient again.
    n = 4 * SAMPLE
    memory, grad = torch.rand(n, generator=generator(1)), torch.rand(n, generator=generator(2))
    grad[drawn(n)] = 7.0
    expected, k = memory + grad, n // 8
    assert int((expected >= 7.0).sum()) < k
    indices, values = feedback_topk(memory, grad, k)
    assert torch.equal(indices, reference.topk_indices(expected, k))
    assert torch.equal(values, expected[indices])
    memory[indices] = values
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    fast, grad = normal(40_000).to(dtype), normal(40_000).to(dtype).flip(0)
    slow = fast.clone()
    for mine, expected in zip(
        feedback_topk(fast, grad, 400), reference.feedback_topk(slow, grad, 400), strict=True
    ):
        assert torch.equal(mine, expected)
    assert torch.equal(fast, slow)
    for mine, expected in zip(take_topk(fast, 40, 0.5), reference.take_topk(slow, 40, 0.5), strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal(fast, slow)


def test_strided_views_take_the_reference_path_and_leave_the_gaps_alone() -> None:
    buffer = torch.full((200,), 7.0)
    buffer[::2] = normal(100)
    expected = buffer[::2].clone()
    chosen = take_topk(buffer[::2], 5)[0]
    assert torch.equal(chosen, reference.topk_indices(expected, 5))
    assert not buffer[::2][chosen].any()
    assert (buffer[1::2] == 7.0).all()


@pytest.mark.parametrize("k", [-1, 11])
def test_k_outside_the_range_raises(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k={k} is outside 0 … 10"):
        take_topk(torch.zeros(10), k)
    with pytest.raises(ValueError, match=rf"k={k} is outside 0 … 10"):
        feedback_topk(torch.zeros(10), torch.zeros(10), k)


def test_unequal_sizes_raise_instead_of_reading_beyond_the_end() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        feedback_topk(torch.zeros(10), torch.zeros(9), 1)
