"""The k-th largest magnitude against a sort."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels.cpu.kth import kth_magnitude
from tests.support.inputs import CHOICES
from tests.support.looped import looped


def by_sorting(x: Tensor, k: int) -> tuple[float, int]:
    """The k-th largest magnitude, and how many of its equals are among the k largest."""
    ordered = x.abs().masked_fill(x.isnan(), torch.inf).sort(descending=True).values
    threshold = ordered[k - 1]
    return float(threshold), k - int((ordered > threshold).sum())


def by_counting(x: Tensor, k: int) -> tuple[float, int]:
    threshold, ties = kth_magnitude(x.view(torch.int32).numpy(), k)
    return float(np.int32(threshold).view(np.float32)), ties


@looped("n", [1, 2, 17, 8191, 8193, 100_003])
@looped("kind", CHOICES)
def test_same_as_sorting(kind: Callable[[int], Tensor], n: int) -> None:
    x = kind(n)
    for k in sorted({1, (n + 1) // 2, n}):
        assert by_counting(x, k) == by_sorting(x, k), f"k={k}"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.lists(st.floats(width=32), min_size=1, max_size=80))
def test_any_short_list(data: st.DataObject, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    k = data.draw(st.integers(1, len(numbers)))
    assert by_counting(x, k) == by_sorting(x, k)


def test_widest_range_there_is() -> None:
    # 0 … Inf in one histogram: the upper end of the last bin would lie beyond int32.
    x = torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max, torch.inf, torch.nan])
    assert [by_counting(x, k) for k in range(1, 6)] == [by_sorting(x, k) for k in range(1, 6)]
