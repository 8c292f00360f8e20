"""Values in a shorter type than the gradient's own."""

from __future__ import annotations

import torch
from torch import Tensor


def shorter(wanted: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """The type in which values travel: `wanted` where it is shorter than the gradient's own.

    >>> shorter(torch.float16, torch.float32), shorter(None, torch.float32)
    (torch.float16, torch.float32)
    """
    return own if wanted is None or wanted.itemsize >= own.itemsize else wanted


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, saturated at its largest number; Inf stays Inf and NaN stays NaN."""
    if dtype == values.dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def check_narrow(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the type for values on the wire when there is such a one, else raise."""
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"values cannot travel as {dtype}; choose torch.float16 or torch.bfloat16")
    return dtype
