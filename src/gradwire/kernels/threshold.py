"""Passes over all elements that compare magnitudes with one threshold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract


class Moments(NamedTuple):
    """Sums in float64 over the elements whose magnitude reaches a threshold."""

    number: int
    """How many reach it; NaN does."""
    total: float
    """Σ|x|; not finite if any of them is not."""
    squares: float
    """Σ|x|²."""


def _has_room(x: Tensor, threshold: float, capacity: int) -> None:
    if capacity < 0:
        raise ValueError(f"capacity={capacity} is not 0 or more")


@contract(_has_room)
def indices_reaching(x: Tensor, threshold: float, capacity: int) -> Tensor:
    """Indices (count,) int64, ascending, of the elements of x (n,) with |x| >= threshold; NaN reaches any.

    If more than `capacity` reach it, the first `capacity` + 1 of them. The threshold is rounded to the
    type of `x`; one that is negative or NaN raises.

    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 1.0, 4)
    tensor([0, 1, 2])
    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 0.0, 1)
    tensor([0, 1])
    """
    limit = rounded(threshold, x.dtype)
    return (~(x.abs() < limit)).nonzero().view(-1)[: capacity + 1]


@contract()
def moments_reaching(x: Tensor, threshold: float) -> Moments:
    """How many elements of x (n,) reach the threshold, and the sums of their magnitudes and squares.

    >>> moments_reaching(torch.tensor([1.0, -3.0, 0.5]), 1.0)
    Moments(number=2, total=4.0, squares=10.0)
    """
    magnitude = x.abs()
    reaching = magnitude[~(magnitude < rounded(threshold, x.dtype))].double()
    return Moments(reaching.numel(), float(reaching.sum()), float(reaching.square().sum()))


def rounded(threshold: float, dtype: torch.dtype) -> float:
    """`threshold` in the type that it is compared in; raises unless it is a number that is 0 or more.

    >>> rounded(0.1, torch.float16), rounded(1e6, torch.float16)
    (0.0999755859375, inf)
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold={threshold} is not 0 or more; magnitudes are compared with it")
    # The absolute value turns -0.0, whose bits are those of the smallest integer, into 0.0.
    return abs(float(torch.tensor(threshold, dtype=dtype, device="cpu")))
