"""The largest magnitudes, exactly."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices (k,) int64, ascending, of the k largest magnitudes of x (n,); ties to the lowest index.

    >>> import torch
    >>> topk_indices(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2)
    tensor([1, 3])
    """
    _check_count(k, x)
    if not is_fast(x):
        return reference.topk_indices(x, k)
    return torch.from_numpy(cpu.topk_indices(x.numpy(), k))


def take_topk(x: Tensor, k: int, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """`topk_indices` and `take` in one: (indices (k,), weight · values (k,)), leaving zeros in x (n,).

    For whoever takes what it chose at once: values are read while the selection passes by them.

    >>> import torch
    >>> x = torch.tensor([1.0, -3.0, 2.0, 3.0])
    >>> take_topk(x, 2, 0.5), x
    ((tensor([1, 3]), tensor([-1.5000,  1.5000])), tensor([1., 0., 2., 0.]))
    """
    _check_count(k, x)
    if not is_fast(x):
        return reference.take_topk(x, k, weight)
    array = x.numpy()
    indices, values = cpu.take_topk(array, array[:0], k, np.float32(weight))
    return torch.from_numpy(indices), torch.from_numpy(values)


def feedback_topk(memory: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Error feedback and top-k in one pass: memory += grad, then `take_topk` of the sum; both are (n,).

    For whoever has the whole gradient at hand. Under DDP it arrives in buckets, and must be kept until the
    verdict: there `fold` and the selection are two jobs.

    >>> import torch
    >>> memory = torch.tensor([1.0, -3.0, 2.0])
    >>> feedback_topk(memory, torch.tensor([0.0, 2.0, 2.0]), 1), memory
    ((tensor([2]), tensor([4.])), tensor([ 1., -1.,  0.]))
    """
    if memory.shape != grad.shape:
        raise ValueError(f"shapes differ: {memory.shape}, {grad.shape}")
    _check_count(k, memory)
    if not is_fast(memory, grad):
        return reference.feedback_topk(memory, grad, k)
    indices, values = cpu.take_topk(memory.numpy(), grad.numpy(), k, np.float32(1.0))
    return torch.from_numpy(indices), torch.from_numpy(values)


def _check_count(k: int, x: Tensor) -> None:
    if not 0 <= k <= x.numel():
        raise ValueError(f"k={k} is outside 0 … {x.numel()}, the number of elements")
