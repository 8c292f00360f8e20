"""Selection and sums of the elements whose magnitude reaches a threshold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract


class Moments(NamedTuple):
    """Count and sums, in float64, of the elements x whose magnitude reaches a threshold."""

    number: int
    """Number of these elements; NaN is one."""
    total: float
    """Σ|x|; not finite if any of the elements is not."""
    squares: float
    """Σ|x|²."""


def _has_room(x: Tensor, threshold: float, capacity: int) -> None:
    if capacity < 0:
        raise ValueError(f"capacity={capacity} is not 0 or more")


@contract(_has_room)
def indices_reaching(x: Tensor, threshold: float, capacity: int) -> Tensor:
    """Ascending int64 indices (count,) of the elements of x (n,) with |x| >= threshold, and of NaN.

    If there are more than `capacity`, only the first `capacity` + 1 are returned. The threshold is rounded to
    the type of x. Raises `ValueError` if it is negative or NaN, or `capacity` is negative.

    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 1.0, 4)
    tensor([0, 1, 2])
    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 0.0, 1)
    tensor([0, 1])
    """
    limit = rounded(threshold, x.dtype)
    return (~(x.abs() < limit)).nonzero().view(-1)[: capacity + 1]


@contract()
def moments_reaching(x: Tensor, threshold: float) -> Moments:
    """Number of the elements of x (n,) that reach the threshold, and sums of their magnitudes and squares.

    >>> moments_reaching(torch.tensor([1.0, -3.0, 0.5]), 1.0)
    Moments(number=2, total=4.0, squares=10.0)
    """
    magnitude = x.abs()
    reaching = magnitude[~(magnitude < rounded(threshold, x.dtype))].double()
    return Moments(reaching.numel(), float(reaching.sum()), float(reaching.square().sum()))


def rounded(threshold: float, dtype: torch.dtype) -> float:
    """Round `threshold` to `dtype`, in which magnitudes are compared with it.

    Raises `ValueError` if it is negative or NaN.

    >>> rounded(0.1, torch.float16), rounded(1e6, torch.float16)
    (0.0999755859375, inf)
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold={threshold} is not 0 or more; magnitudes are compared with it")
    # The absolute value turns -0.0, whose bits are those of the smallest integer, into 0.0.
    return abs(float(torch.tensor(threshold, dtype=dtype, device="cpu")))
