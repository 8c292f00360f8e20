"""Programs that read a flag on the device, and return at once if there is nothing to do."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import load, magnitude
from gradwire.kernels.device.compensation import FLOATS, INFINITY
from gradwire.kernels.device.launch import TILE, bound, is_taken, launch
from gradwire.kernels.device.tables import piece_tiles, pointer_tiles
from gradwire.kernels.pieces import Pieces

_PROGRAMS = 1024
"""Most programs of a launch: enough for every multiprocessor, and few enough to start and end within
microseconds."""


@bound
def mark_not_finite(values: Tensor, mark: Tensor) -> None:
    """Twin of `gradwire.kernels.flagged.mark_not_finite`. Look at all values in one launch. Memory traffic:
    the bytes of the values.
    """
    if not is_taken(values, dtypes=FLOATS) or mark.device != values.device:
        return NotImplemented
    count = values.numel()
    launch(_mark_not_finite, min(-(-count // TILE), _PROGRAMS), values, count, mark, INFINITY, TILE=TILE)
    return None


@bound
def poison(buffers: Sequence[Tensor], bad: Tensor) -> None:
    """Twin of `gradwire.kernels.flagged.poison`. Fill all buffers in one launch, from a table of their
    addresses.
    """
    places = []
    for buffer in buffers:
        if not (buffer.is_contiguous() and buffer.is_floating_point() and buffer.itemsize >= 2):
            return NotImplemented
        places.append((buffer.data_ptr(), buffer.nbytes))
    rows = pointer_tiles(tuple(places), bad.device)
    flag = bad.view(torch.uint8) if bad.dtype is torch.bool else bad
    launch(_poison, min(len(rows), _PROGRAMS), rows, len(rows), flag, TILE=TILE)
    return None


@bound
def zero_idle(plane: Tensor, pieces: Pieces, idle: Tensor) -> None:
    """Twin of `gradwire.kernels.flagged.zero_idle`. Clear idle pieces in one launch: a program per tile reads
    the flag of its piece.
    """
    if not is_taken(plane) or not idle.is_contiguous() or idle.device != plane.device:
        return NotImplemented
    tiles = piece_tiles(pieces, plane.device)
    launch(_zero_idle, len(tiles.rows), plane, tiles.rows, idle.view(torch.uint8), TILE=TILE)
    return None


@triton.jit(do_not_specialize=["count", "infinity"])
def _mark_not_finite(values, count, mark, infinity, TILE: tl.constexpr):
    """Write 1 to `mark` if the magnitude of a value, as bits of float32, is `infinity` or above."""
    place, largest = tl.arange(0, TILE), tl.zeros((TILE,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * TILE
    while start < count:
        if start + TILE <= count:
            found = load(values + start + place, None)
        else:
            found = load(values + start + place, start + place < count)
        largest = tl.maximum(largest, magnitude(found))
        start += tl.num_programs(0).to(tl.int64) * TILE
    if tl.max(largest) >= infinity:
        tl.store(mark, 1)


@triton.jit(do_not_specialize=["count"])
def _poison(rows, count, bad, TILE: tl.constexpr):
    """Write NaN to the memory in `rows` (address, 16-bit words), unless `bad` is 0.

    The word 0x7FF8, repeated, is a NaN in float16, bfloat16, float32 and float64.
    """
    if tl.load(bad) != 0:
        place = tl.arange(0, TILE)
        number = tl.program_id(0)
        while number < count:
            row = rows + number.to(tl.int64) * 2
            words = tl.load(row).to(tl.pointer_type(tl.int16))
            tl.store(words + place, tl.full((TILE,), 0x7FF8, tl.int16), place < tl.load(row + 1))
            number += tl.num_programs(0)


@triton.jit
def _zero_idle(plane, rows, idle, TILE: tl.constexpr):
    """Write zeros to a tile if the flag of its piece is set."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    if tl.load(idle + tl.load(row + 3)) != 0:
        place = tl.arange(0, TILE)
        tl.store(plane + tl.load(row) + place, tl.zeros((TILE,), tl.float32), place < tl.load(row + 2))
