"""The largest of each chunk, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import chunks as bodies
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.dispatch import DECLINED, Declined

_LONGEST = 1 << 16
"""Elements of the longest chunk: the code repeats for each `TILE` of it."""


def chunk_topk_indices(x: Tensor, chunk: int, keep: int) -> Tensor | Declined:
    """4 bytes an element; for one of each chunk only, of which a maximum has the index."""
    if not is_taken(x) or keep != 1 or chunk > _LONGEST:
        return DECLINED
    found = torch.empty(-(-x.numel() // chunk), dtype=torch.int64, device=x.device)
    width = min(TILE, 1 << (chunk - 1).bit_length())
    rows = TILE // width
    arguments, programs = (x, x.numel(), found), -(-len(found) // rows)
    launch(bodies.chunk_maxima, programs, *arguments, CHUNK=chunk, ROWS=rows, WIDTH=width)
    return found
