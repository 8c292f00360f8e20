"""The largest of each chunk, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import chunks as bodies
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.dispatch import DECLINED, Declined

_WIDTH = 128
"""Chunks of a program: a row of them is 512 bytes side by side."""


def chunk_topk_indices(x: Tensor, chunks: int, keep: int) -> Tensor | Declined:
    """4 bytes an element; for one of each chunk only, of which a maximum has the index."""
    if not is_taken(x) or keep != 1:
        return DECLINED
    found = torch.empty(min(chunks, x.numel()), dtype=torch.int64, device=x.device)
    arguments, programs = (x, x.numel(), chunks, found), -(-len(found) // _WIDTH)
    launch(bodies.chunk_maxima, programs, *arguments, ROWS=TILE // _WIDTH, WIDTH=_WIDTH)
    return found.sort().values
