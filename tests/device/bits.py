"""When two tensors are the same."""

from __future__ import annotations

import torch
from torch import Tensor


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bits, but that any NaN is any other."""
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    is_nan = expected.isnan()
    zeros = [each.masked_fill(is_nan, 0.0) for each in (found, expected)]
    return torch.equal(found.isnan(), is_nan) and torch.equal(*(each.view(torch.int32) for each in zeros))
