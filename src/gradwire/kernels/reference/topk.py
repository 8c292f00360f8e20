"""The largest magnitudes, exactly. Ties go to the lowest index; NaN and Inf count as the largest of all."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import checked
from gradwire.kernels.reference.places import take


def _has_as_many(x: Tensor, k: int, weight: float = 1.0) -> None:
    if not 0 <= k <= x.numel():
        raise ValueError(f"k={k} is outside 0 … {x.numel()}, the number of elements")


def _is_one_shape(memory: Tensor, grad: Tensor, k: int) -> None:
    if memory.shape != grad.shape:
        raise ValueError(f"shapes differ: {memory.shape}, {grad.shape}")
    _has_as_many(memory, k)


@checked(_has_as_many)
def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices (k,) int64, ascending, of the k largest magnitudes of x (n,).

    >>> topk_indices(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2)
    tensor([1, 3])
    """
    magnitude = x.abs().masked_fill(x.isnan(), torch.inf)
    order = torch.sort(magnitude, descending=True, stable=True).indices
    return order[:k].sort().values


@checked(_has_as_many)
def take_topk(x: Tensor, k: int, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """`topk_indices` and `take` in one: (indices (k,), weight · values (k,)), leaving zeros in x (n,).

    A kernel reads the values while the selection passes by them.

    >>> x = torch.tensor([1.0, -3.0, 2.0, 3.0])
    >>> take_topk(x, 2, 0.5), x
    ((tensor([1, 3]), tensor([-1.5000,  1.5000])), tensor([1., 0., 2., 0.]))
    """
    indices = topk_indices(x, k)
    return indices, take(x, indices, weight)


@checked(_is_one_shape)
def feedback_topk(memory: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Error feedback and top-k in one pass: memory += grad, then `take_topk` of the sum; both are (n,).

    This needs the whole gradient at once. Under DDP it arrives in buckets and must be kept until the verdict,
    so `fold` and the selection are two steps.

    >>> memory = torch.tensor([1.0, -3.0, 2.0])
    >>> feedback_topk(memory, torch.tensor([0.0, 2.0, 2.0]), 1), memory
    ((tensor([2]), tensor([4.])), tensor([ 1., -1.,  0.]))
    """
    memory.add_(grad)
    return take_topk(memory, k)
