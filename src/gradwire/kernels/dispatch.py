"""Which tensors the kernels of the CPU take; all others go to the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def is_fast(*tensors: Tensor) -> bool:
    """Whether all are contiguous float32 tensors on the CPU.

    >>> is_fast(torch.zeros(4)), is_fast(torch.zeros(4)[::2]), is_fast(torch.zeros(4, dtype=torch.float64))
    (True, False, False)
    """
    for t in tensors:  # noqa: SIM110 - a generator takes twice as long, and this precedes every kernel
        if t.dtype != torch.float32 or not t.is_cpu or not t.is_contiguous():
            return False
    return True


def is_native(*tensors: Tensor) -> bool:
    """Whether all are contiguous tensors on the CPU, of any type: for kernels of integers."""
    return all(t.is_cpu and t.is_contiguous() for t in tensors)


def rounded(threshold: float, dtype: torch.dtype) -> float:
    """`threshold` in the type that it is compared in; raises unless it is a number that is 0 or more.

    >>> rounded(0.1, torch.float16), rounded(1e6, torch.float16)
    (0.0999755859375, inf)
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold={threshold} is not 0 or more; magnitudes are compared with it")
    # The absolute value turns -0.0, whose bits are those of the smallest integer, into 0.0.
    return abs(float(torch.tensor(threshold, dtype=dtype)))
