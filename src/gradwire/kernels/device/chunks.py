"""The largest of each chunk, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import load, magnitude
from gradwire.kernels.device.launch import TILE, is_taken, launch

_WIDTH = 128
"""Chunks of a program: a row of them is 512 bytes side by side."""


def chunk_topk_indices(x: Tensor, chunks: int, keep: int) -> Tensor:
    """4 bytes an element; for one of each chunk only, of which a maximum has the index."""
    if not is_taken(x) or keep != 1:
        return NotImplemented
    found = torch.empty(min(chunks, x.numel()), dtype=torch.int64, device=x.device)
    arguments, programs = (x, x.numel(), chunks, found), -(-len(found) // _WIDTH)
    launch(_chunk_maxima, programs, *arguments, ROWS=TILE // _WIDTH, WIDTH=_WIDTH)
    return found.sort().values


@triton.jit(do_not_specialize=["numel", "chunks"])
def _chunk_maxima(x, numel, chunks, found, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each chunk x[j::chunks] the index of the largest; ties go to the lowest, NaN and Inf are equals."""
    chunk = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)[:, None]
    largest, place = tl.full((WIDTH,), -1, tl.int32), tl.zeros((WIDTH,), tl.int64)
    begin = tl.zeros((), tl.int64)
    while begin * chunks < numel:
        index = (begin + row) * chunks + chunk[None, :]
        is_there = (chunk[None, :] < chunks) & (index < numel)
        bits = tl.where(is_there, tl.minimum(magnitude(load(x + index, is_there)), 0x7F800000), -1)
        top, at = tl.max(bits, 0, return_indices=True, return_indices_tie_break_left=True)
        # Only what is larger: an equal one in an earlier row stays.
        place = tl.where(top > largest, begin + at, place)
        largest = tl.maximum(largest, top)
        begin += ROWS
    tl.store(found + chunk, place * chunks + chunk, (chunk < chunks) & (chunk < numel))
