"""Programs that read a number on the device, and return at once where nothing is to do."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.device.tables import piece_tiles, pointer_tiles
from gradwire.kernels.pieces import Pieces

_PROGRAMS = 1024
"""Enough for every multiprocessor, and few enough to start and end within microseconds."""


def poison(buffers: Sequence[Tensor], bad: Tensor) -> None:
    """One launch for all buffers, of which a table says where they lie."""
    if any(not b.is_contiguous() or not b.is_floating_point() or b.itemsize < 2 for b in buffers):
        return NotImplemented
    places = tuple((buffer.data_ptr(), buffer.nbytes) for buffer in buffers)
    rows, flag = pointer_tiles(places, bad.device), bad.float()
    launch(_poison, min(len(rows), _PROGRAMS), rows, len(rows), flag, TILE=TILE)
    return None


def zero_idle(plane: Tensor, pieces: Pieces, idle: Tensor) -> None:
    """A program for each tile reads the flag of its piece."""
    if not is_taken(plane) or not idle.is_contiguous() or idle.device != plane.device:
        return NotImplemented
    tiles = piece_tiles(pieces, plane.device)
    launch(_zero_idle, len(tiles.rows), plane, tiles.rows, idle.view(torch.uint8), TILE=TILE)
    return None


@triton.jit(do_not_specialize=["count"])
def _poison(rows, count, bad, TILE: tl.constexpr):
    """NaN into memory at addresses (address, 16-bit words), unless `bad` is 0.

    The word 0x7FF8, repeated, is a NaN of float16, bfloat16, float32 and float64.
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
    """Zeros into the tiles of pieces whose flag is set."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    if tl.load(idle + tl.load(row + 3)) != 0:
        place = tl.arange(0, TILE)
        tl.store(plane + tl.load(row) + place, tl.zeros((TILE,), tl.float32), place < tl.load(row + 2))
