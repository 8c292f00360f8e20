"""Exact top-k by magnitude. Ties go to the lowest index. NaN and Inf count as the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract


def _has_as_many(x: Tensor, k: int) -> None:
    if not 0 <= k <= x.numel():
        raise ValueError(f"k={k} is outside 0 … {x.numel()}, the number of elements")


@contract(_has_as_many)
def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices (k,) int64, ascending, of the k largest magnitudes of x (n,).

    >>> topk_indices(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2)
    tensor([1, 3])
    """
    magnitude = x.abs().masked_fill(x.isnan(), torch.inf)
    order = torch.sort(magnitude, descending=True, stable=True).indices
    return order[:k].sort().values
