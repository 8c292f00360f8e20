"""Stochastic levels: one pass where a bucket fits into a program, else up to four.

The longer buckets are read for their largest magnitude, for their norm where that is a sum, and for codes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import stochastic as bodies
from gradwire.kernels.device.launch import TILE, WARPS, is_taken, launch
from gradwire.kernels.device.tables import QUAD, Tiles, block_spans, coded_tiles
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.layouts import Grid
from gradwire.kernels.reference.draws import halves
from gradwire.kernels.reference.stochastic import largest_step

_PIECE = 4096
"""Elements of the longest bucket that a program keeps in registers, and of a piece of a longer one: as many
squares as the contract adds in float32."""


class _Cut(NamedTuple):
    """Tiles, and what of them is constant in compiled code."""

    tiles: Tiles
    constants: dict[str, int | bool]


def _cut(grid: Grid, codes: Tensor, whole: bool) -> _Cut:
    """Into whole buckets, or into pieces of at most `_PIECE` elements."""
    block = grid.width if whole else _PIECE
    width = max(4, 1 << (block - 1).bit_length())
    rows = max(1, TILE // max(width, 64)) if whole else 1
    tiles = coded_tiles(grid.sizes, grid.width, grid.bits, rows, None if whole else _PIECE, codes.device)
    aligned = tiles.aligned and tiles.bytes_aligned and not codes.data_ptr() % QUAD
    constants = {
        "BITS": grid.bits, "ALIGNED": aligned, "ROWS": rows, "BLOCK": block, "WIDTH": width,
        "num_warps": max(WARPS, width // 512),
    }  # fmt: skip
    return _Cut(tiles, constants)


def quantize(
    x: Tensor, grid: Grid, key: int, steps: Tensor, codes: Tensor, *, subtract: bool = False
) -> Declined | None:
    """9 bytes an element in codes of 8 bits, 5 without `subtract`; 4 or 8 more where buckets are long."""
    if not is_taken(x, steps) or not codes.is_contiguous():
        return DECLINED
    whole = grid.width <= _PIECE and grid.clip == math.inf
    tiles, constants = _cut(grid, codes, whole)
    limits = float(grid.levels), largest_step(x.dtype, grid.levels)
    # Without steps that are there already their place is taken by what no program reads.
    tops = steps if whole else _set_steps(x, grid, tiles, steps, limits)
    launch(
        bodies.quantize, len(tiles.rows), x, tiles.rows, tops, steps, codes, *map(_signed, halves(key)),
        *limits, STEPPED=not whole, EUCLIDEAN=grid.norm == "l2", SUBTRACT=subtract, **constants,
    )  # fmt: skip
    return None


def add_quantized(steps: Tensor, codes: Tensor, grid: Grid, out: Tensor, weight: float) -> Declined | None:
    """9 bytes an element in codes of 8 bits."""
    if not is_taken(out, steps) or not codes.is_contiguous():
        return DECLINED
    tiles, constants = _cut(grid, codes, grid.width <= _PIECE)
    launch(bodies.add_quantized, len(tiles.rows), steps, codes, tiles.rows, out, weight, **constants)
    return None


def _set_steps(x: Tensor, grid: Grid, tiles: Tiles, steps: Tensor, limits: tuple[float, float]) -> Tensor:
    """Write the steps; returns the largest magnitudes (buckets,) as integers."""
    tops = torch.zeros(grid.buckets, dtype=torch.int32, device=x.device)
    spans = block_spans(grid.sizes, grid.width, _PIECE, x.device)
    sums = torch.empty(len(tiles.rows), device=x.device)
    pieces = {"ALIGNED": tiles.aligned, "TILE": _PIECE}
    launch(bodies.find_tops, len(tiles.rows), x, tiles.rows, tops, **pieces)
    summed = grid.norm == "l2" or grid.clip < math.inf
    if summed:
        # A warp for each: its 32 threads have two lanes each.
        launch(bodies.sum_squares, len(tiles.rows), x, tiles.rows, tops, sums, **pieces, num_warps=1)
    launch(
        bodies.set_steps, grid.buckets, tops, sums, spans, steps, *limits,
        EUCLIDEAN=grid.norm == "l2", CLIP=grid.clip, SUMMED=summed, num_warps=1,
    )  # fmt: skip
    return tops


def _signed(word: int) -> int:
    """The int32 of the same bits: larger numbers would be compiled for as 64 bits."""
    return word - (1 << 32) if word >> 31 else word
