"""Every rank's share of the mean at places that all ranks know."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.codec.narrow import shorter
from gradwire.kernels import scatter, take


def take_share(x: Tensor, indices: Tensor, world: int, dtype: torch.dtype | None) -> Tensor:
    """Take x/W at `indices` (k,) out of x (numel,): the values (k,) to be summed over ranks.

    With a `dtype` they are in that type where it is shorter than x's own; what rounding drops goes back to x.
    """
    values = take(x, indices, 1.0 / world)
    if shorter(dtype, x.dtype) == x.dtype:
        return values
    assert dtype is not None
    return _narrow(values, x, indices, world, dtype)


def _narrow(values: Tensor, x: Tensor, indices: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    """`values` in the shorter type; the difference goes back to where they came from.

    Each rank is held to a power of two below 1/W of the largest number, so that the sum cannot overflow:
    multiples of it are exact (up to 2048 ranks in float16, 256 in bfloat16), and rounding to nearest
    keeps a partial sum of k ranks at or below k times the limit.
    """
    limit = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / world))
    narrow = values.clamp(-limit, limit).to(dtype)
    scatter(x, indices, values.sub_(narrow).mul_(world))
    return narrow
