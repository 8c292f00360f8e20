"""Values in a shorter type than the gradient's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.moment import Moment


def wire_type(wanted: torch.dtype | None, own: torch.dtype, at: Moment) -> torch.dtype:
    """The type in which values travel: `wanted`, or else the parameters', if shorter than their `own`.

    >>> at = Moment(step=0, unit=0, rank=0, world=1, narrow=torch.bfloat16)
    >>> wire_type(torch.float16, torch.float32, at), wire_type(None, torch.float32, at)
    (torch.float16, torch.bfloat16)
    """
    short = wanted or at.narrow
    return own if short is None or short.itemsize >= own.itemsize else short


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, saturated at its largest number; Inf stays Inf and NaN stays NaN."""
    if dtype == values.dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def held(values: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    """`values` in the shorter type, so that the sum of as many as there are ranks cannot overflow.

    Each is held to a power of two below 1/W of the largest number: multiples of it are exact (up to 2048
    ranks in float16, 256 in bfloat16), and rounding to nearest keeps a partial sum of k ranks at or below k
    times the limit.
    """
    limit = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / world))
    return values.clamp(-limit, limit).to(dtype)


def check_narrow(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the type for values on the wire when there is such a one, else raise."""
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"values cannot travel as {dtype}; choose torch.float16 or torch.bfloat16")
    return dtype
