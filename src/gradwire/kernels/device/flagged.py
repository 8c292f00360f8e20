"""What depends on a number on the device: programs that read it and return at once where nothing is to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import flagged as bodies
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.device.tables import piece_tiles, pointer_tiles
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.pieces import Pieces

_PROGRAMS = 1024
"""Enough for every multiprocessor, and few enough to start and end within microseconds."""


def poison(buffers: Sequence[Tensor], bad: Tensor) -> Declined | None:
    """One launch for all buffers, of which a table says where they lie."""
    if any(not b.is_contiguous() or not b.is_floating_point() or b.itemsize < 2 for b in buffers):
        return DECLINED
    places = tuple((buffer.data_ptr(), buffer.nbytes) for buffer in buffers)
    rows, flag = pointer_tiles(places, bad.device), bad.float()
    launch(bodies.poison, min(len(rows), _PROGRAMS), rows, len(rows), flag, TILE=TILE)
    return None


def zero_idle(plane: Tensor, pieces: Pieces, idle: Tensor) -> Declined | None:
    """A program for each tile reads the flag of its piece."""
    if not is_taken(plane) or not idle.is_contiguous() or idle.device != plane.device:
        return DECLINED
    tiles = piece_tiles(pieces, plane.device)
    launch(bodies.zero_idle, len(tiles.rows), plane, tiles.rows, idle.view(torch.uint8), TILE=TILE)
    return None
