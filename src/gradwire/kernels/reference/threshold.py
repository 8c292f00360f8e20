"""Passes over all elements that compare magnitudes with one threshold."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradwire.kernels.dispatch import checked, rounded


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


@checked(_has_room)
def indices_reaching(x: Tensor, threshold: float, capacity: int) -> Tensor:
    """Indices (count,) int64, ascending, of the elements of x (n,) with |x| >= threshold; NaN reaches any.

    If more than `capacity` reach it, the first `capacity` + 1 of them. The threshold is rounded to the
    type of `x`; one that is negative or NaN raises.

    >>> import torch
    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 1.0, 4)
    tensor([0, 1, 2])
    >>> indices_reaching(torch.tensor([1.0, -3.0, torch.nan, 0.5]), 0.0, 1)
    tensor([0, 1])
    """
    limit = rounded(threshold, x.dtype)
    return (~(x.abs() < limit)).nonzero().view(-1)[: capacity + 1]


def moments_reaching(x: Tensor, threshold: float) -> Moments:
    """How many elements of x (n,) reach the threshold, and the sums of their magnitudes and squares.

    >>> import torch
    >>> moments_reaching(torch.tensor([1.0, -3.0, 0.5]), 1.0)
    Moments(number=2, total=4.0, squares=10.0)
    """
    magnitude = x.abs()
    reaching = magnitude[~(magnitude < rounded(threshold, x.dtype))].double()
    return Moments(reaching.numel(), float(reaching.sum()), float(reaching.square().sum()))
