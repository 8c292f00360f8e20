"""Gather and scatter at given indices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import first_from
from gradwire.kernels.device.launch import is_taken, launch

_TILE = 1024
"""Indices per program."""
_STRETCH = 4096
"""Elements per program that clears."""


def take(x: Tensor, indices: Tensor, weight: float = 1.0) -> Tensor:
    """Twin of `gradwire.kernels.places.take`. Take in one launch. Memory traffic: 12 bytes per index, of
    which 8 are scattered.
    """
    if not is_taken(x) or not indices.is_contiguous():
        return NotImplemented
    count = indices.numel()
    values = torch.empty(count, dtype=torch.float32, device=x.device)
    launch(_take, -(-count // _TILE), x, indices, count, values, weight, TILE=_TILE)
    return values


def scatter(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Twin of `gradwire.kernels.places.scatter`. Write in one launch."""
    if not is_taken(out, values) or not indices.is_contiguous():
        return NotImplemented
    count = indices.numel()
    launch(_scatter, -(-count // _TILE), out, indices, count, values, TILE=_TILE)
    return None


def put(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Twin of `gradwire.kernels.places.put`. Write in one launch: each program clears a stretch, and writes
    the values whose indices lie in it.
    """
    if not is_taken(out, values) or not indices.is_contiguous():
        return NotImplemented
    numel, count = out.numel(), indices.numel()
    launch(_put, -(-numel // _STRETCH), out, numel, indices, count, values, TILE=_STRETCH, SLOTS=512)
    return None


@triton.jit(do_not_specialize=["count"])
def _take(x, indices, count, values, weight, TILE: tl.constexpr):
    """Write weight · x at a tile of indices to `values`, and 0 to x there."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + place, place < count, other=0)
    value = tl.load(x + index, place < count, other=0.0)
    tl.store(values + place, value * weight, place < count)
    tl.store(x + index, tl.zeros((TILE,), tl.float32), place < count)


@triton.jit(do_not_specialize=["count"])
def _scatter(out, indices, count, values, TILE: tl.constexpr):
    """Write a tile of values to their indices."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + place, place < count, other=0)
    tl.store(out + index, tl.load(values + place, place < count, other=0.0), place < count)


@triton.jit(do_not_specialize=["numel", "count"])
def _put(out, numel, indices, count, values, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """Clear a tile of `out`, then write the values whose ascending indices lie in it."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    place = begin + tl.arange(0, TILE)
    if begin + TILE <= numel:  # without a mask, four at once
        tl.store(out + place, tl.zeros((TILE,), tl.float32))
    else:
        tl.store(out + place, tl.zeros((TILE,), tl.float32), place < numel)
    slot, last = first_from(indices, count, begin), first_from(indices, count, begin + TILE)
    # What other threads of this program have cleared before is zero.
    tl.debug_barrier()
    while slot < last:
        here = slot + tl.arange(0, SLOTS)
        index = tl.load(indices + here, here < last, other=0)
        tl.store(out + index, tl.load(values + here, here < last, other=0.0), here < last)
        slot += SLOTS
