"""How a kernel is launched, and which tensors kernels take: the border between typed and untyped code."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

TILE = 2048
"""Elements of a program: with 8 warps, 8 a thread, in two vectors of 16 bytes."""
WARPS = 8


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `kernel` on a grid of `programs`, on the current stream; nothing where there are none.

    Never with fused multiplications and additions: they round once where the contracts round twice. What
    is a constant of the compiled code goes by name; `num_warps` is among these, if it is not `WARPS`.
    """
    if not programs:
        return
    where = next(each.device for each in arguments if isinstance(each, Tensor))
    # Triton launches on the thread's current device, which need not be the one that has the tensors.
    is_current = where.type != "cuda" or where.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(where):
        kernel[(programs,)](*arguments, **{"num_warps": WARPS, **constants}, enable_fp_fusion=False)


def is_taken(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether all are contiguous, of one of `dtypes`, and on one device."""
    device = tensors[0].device
    return all(t.dtype in dtypes and t.is_contiguous() and t.device == device for t in tensors)
