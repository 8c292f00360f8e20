"""Largest element of each chunk, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import load, magnitude
from gradwire.kernels.device.launch import TILE, is_taken, launch

_WIDTH = 256
"""Chunks per program: one row of them is 1 KiB of neighbouring elements."""


def chunk_topk_indices(x: Tensor, chunks: int, keep: int) -> Tensor:
    """Twin of `gradwire.kernels.chunks.chunk_topk_indices`. Select in one pass, 4 bytes per element, if
    `keep` is 1; other calls are left to plain torch.

    The rows of the maxima are sorted, not the indices: they have fewer bits, and so take fewer passes.
    """
    if not is_taken(x) or keep != 1:
        return NotImplemented
    count, rows = min(chunks, x.numel()), -(-x.numel() // chunks)
    kind = torch.uint8 if rows <= 256 else torch.int32
    found = torch.empty(count, dtype=kind, device=x.device)
    launch(_chunk_maxima, -(-count // _WIDTH), x, x.numel(), chunks, found, ROWS=TILE // _WIDTH, WIDTH=_WIDTH)
    row, chunk = found.sort(stable=True)
    return chunk.add_(row.long(), alpha=chunks)


@triton.jit(do_not_specialize=["numel", "chunks"])
def _chunk_maxima(x, numel, chunks, found, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the row of the largest element of each chunk x[j::chunks]. Ties go to the first row; NaN and Inf
    are equal.

    Each thread keeps the largest of its own rows. Only the last step compares across threads: otherwise these
    would wait for each other, and for memory, in every step.
    """
    chunk = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)[:, None]
    largest, place = tl.full((ROWS, WIDTH), -1, tl.int32), tl.zeros((ROWS, WIDTH), tl.int32)
    begin = tl.zeros((), tl.int64)
    while begin * chunks < numel:
        index = (begin + row) * chunks + chunk[None, :]
        is_there = (chunk[None, :] < chunks) & (index < numel)
        bits = tl.where(is_there, tl.minimum(magnitude(load(x + index, is_there)), 0x7F800000), -1)
        # Only what is larger: an equal one in an earlier row stays.
        place = tl.where(bits > largest, (begin + row).to(tl.int32), place)
        largest = tl.maximum(largest, bits)
        begin += ROWS
    top = tl.max(largest, 0)
    first = tl.min(tl.where(largest == top[None, :], place, 0x7FFFFFFF), 0)
    tl.store(found + chunk, first.to(found.dtype.element_ty), (chunk < chunks) & (chunk < numel))
