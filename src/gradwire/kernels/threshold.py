"""Passes over all elements that compare magnitudes with one threshold, and samples to guess it from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast, rounded


class Moments(NamedTuple):
    """Sums in float64 over the elements whose magnitude reaches a threshold."""

    number: int
    """How many reach it; NaN does."""
    total: float
    """Σ|x|; not finite if any of them is not."""
    squares: float
    """Σ|x|²."""


def indices_reaching(x: Tensor, threshold: float, capacity: int) -> Tensor:
    """Indices (count,) int64, ascending, of the elements of x (n,) with |x| >= threshold; NaN reaches any.

    If more than `capacity` reach it, the first `capacity` + 1 of them. The threshold is rounded to the
    type of `x`; one that is negative or NaN raises.

    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 1.0, 4)
    tensor([0, 1, 2])
    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 0.0, 1)
    tensor([0, 1])
    """
    if capacity < 0:
        raise ValueError(f"capacity={capacity} is not 0 or more")
    limit = rounded(threshold, x.dtype)
    if not is_fast(x):
        return reference.indices_reaching(x, limit, capacity)
    found = np.empty(min(capacity, x.numel()) + 1, np.int64)
    count = cpu.indices_reaching(x.numpy().view(np.int32), np.float32(limit).view(np.int32), found)
    return torch.from_numpy(found[:count])


def moments_reaching(x: Tensor, threshold: float) -> Moments:
    """How many elements of x (n,) reach the threshold, and the sums of their magnitudes and squares.

    >>> moments_reaching(torch.tensor([1.0, -3.0, 0.5]), 1.0)
    Moments(number=2, total=4.0, squares=10.0)
    """
    limit = rounded(threshold, x.dtype)
    if not is_fast(x):
        return Moments(*reference.moments_reaching(x, limit))
    count, total, squares = cpu.moments_reaching(x.numpy(), np.float32(limit))
    return Moments(int(count), float(total), float(squares))


def stratified_indices(n: int, size: int, seed: int) -> Tensor:
    """A random index out of each of `size` equal stretches of 0 … n - 1: (size,) int64, ascending.

    Every index is as likely as any other (up to the rounding of the stretches), and columns of a matrix
    cannot fall in step with it as they can with a stride.

    >>> stratified_indices(4, 4, seed=1)
    tensor([0, 1, 2, 3])
    """
    if not 0 <= size <= n:
        raise ValueError(f"size={size} is outside 0 … n={n}")
    return torch.from_numpy(cpu.stratified_indices(n, size, seed))
