"""Launching of kernels, and the types of tensors that they take: the border between typed and untyped
code.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels.uploads import kept_by_stream, sent_to

TILE = 2048
"""Elements per program: with 8 warps, 8 per thread, in two vectors of 16 bytes."""
WARPS = 8


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `kernel` on a grid of `programs` on the current stream; do nothing if there are none.

    Multiplications and additions are never fused: that would round once where the contracts round twice.
    Constants of the compiled code are keyword arguments, `num_warps` among them, if it is not `WARPS`.
    """
    if not programs:
        return
    where = next(each.device for each in arguments if isinstance(each, Tensor))
    # Triton launches on the thread's current device, which need not be the one that has the tensors.
    is_current = where.type != "cuda" or where.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(where):
        kernel[(programs,)](*arguments, **{"num_warps": WARPS, **constants}, enable_fp_fusion=False)


def is_taken(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """True if all `tensors` are contiguous, on one device, and of one of `dtypes`."""
    device = tensors[0].device
    return all(t.dtype in dtypes and t.is_contiguous() and t.device == device for t in tensors)


@kept_by_stream(maxsize=64)
def counter_of(device: torch.device) -> Tensor:
    """Counter (1,) int32, 0, of the programs of a launch that have ended, for `is_last`.

    There is one for each stream, as launches of a stream run one after the other. The last program of a
    launch leaves 0 for the next launch. It is made by the first of them, not in a captured graph: steps are
    not captured.
    """
    return sent_to(torch.zeros(1, dtype=torch.int32, device="cpu"), device)
