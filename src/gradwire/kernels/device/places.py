"""Elements at given indices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.launch import is_taken, launch

_TILE = 1024
"""Indices of a program."""


def take(x: Tensor, indices: Tensor, weight: float = 1.0) -> Tensor:
    """12 bytes an index, of which 8 anywhere; in one launch."""
    if not is_taken(x) or not indices.is_contiguous():
        return NotImplemented
    count = indices.numel()
    values = torch.empty(count, device=x.device)
    launch(_take, -(-count // _TILE), x, indices, count, values, weight, TILE=_TILE)
    return values


def scatter(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """In one launch."""
    if not is_taken(out, values) or not indices.is_contiguous():
        return NotImplemented
    count = indices.numel()
    launch(_scatter, -(-count // _TILE), out, indices, count, values, TILE=_TILE)
    return None


def put(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """In one launch, after one that clears."""
    if not is_taken(out, values) or not indices.is_contiguous():
        return NotImplemented
    out.zero_()
    return scatter(out, indices, values)


@triton.jit(do_not_specialize=["count"])
def _take(x, indices, count, values, weight, TILE: tl.constexpr):
    """weight · x at the indices of a tile, where x becomes zero."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + place, place < count, other=0)
    value = tl.load(x + index, place < count, other=0.0)
    tl.store(values + place, value * weight, place < count)
    tl.store(x + index, tl.zeros((TILE,), tl.float32), place < count)


@triton.jit(do_not_specialize=["count"])
def _scatter(out, indices, count, values, TILE: tl.constexpr):
    """The values of a tile to their indices."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + place, place < count, other=0)
    tl.store(out + index, tl.load(values + place, place < count, other=0.0), place < count)
