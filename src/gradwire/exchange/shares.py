"""Every rank's share of the mean at places that all ranks know."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.cast import cast_for_sum
from gradwire.kernels import scatter, take


def take_share(x: Tensor, indices: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    """Take x/W at `indices` (k,) out of x (numel,): the values (k,) of `dtype` to be summed over ranks.

    That is x's own or shorter; what rounding drops goes back to x.
    """
    values = take(x, indices, 1.0 / world)
    return values if dtype == x.dtype else _narrow(values, x, indices, world, dtype)


def _narrow(values: Tensor, x: Tensor, indices: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    """`values` in the shorter type; the difference goes back to where they came from."""
    narrow = cast_for_sum(values, world, dtype)
    scatter(x, indices, values.sub_(narrow).mul_(world))
    return narrow
