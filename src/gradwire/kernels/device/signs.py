"""One bit per element, and one or two levels per block: a pass that sums, and one that packs and subtracts.

Sums are float64, in the order of tiles, which is not the order on the CPU. So a level can differ from the
CPU's by one unit in float32's last place, if it lies very close to the middle of two numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import load
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.device.tables import Tiles, block_spans, coded_tiles
from gradwire.kernels.layouts import Blocks

_STEP = 512
"""Sums of tiles that are added side by side."""


def _tiles(blocks: Blocks, device: torch.device) -> Tiles:
    return coded_tiles(blocks.sizes, blocks.step, 1, 1, TILE, device)


def pack_signs(x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, *, leave: bool = False) -> None:
    """Twin of `gradwire.kernels.signs.pack_signs`. Encode in two passes. Memory traffic: 12 bytes per
    element, 8 without `leave`; if the unit is small, the second read is from the cache.
    """
    if not is_taken(x, levels):
        return NotImplemented
    tiles, two = _tiles(blocks, x.device), levels.shape[1] == 2
    programs = len(tiles.rows)
    sums = torch.empty(3 * programs, dtype=torch.float64, device=x.device)
    launch(_sum_sides, programs, x, tiles.rows, sums, ALIGNED=tiles.aligned, TILE=TILE)
    spans = block_spans(blocks.sizes, blocks.step, TILE, x.device)
    constants = {"LEVELS": levels.shape[1], "STEP": _STEP, "num_warps": 4}
    launch(_set_levels, levels.numel(), sums, spans, levels, **constants)
    launch(
        _pack_signs, programs, x, tiles.rows, levels, packed,
        TWO=two, LEAVE=leave, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return None


def add_signs(levels: Tensor, packed: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    """Twin of `gradwire.kernels.signs.add_signs`. Decode and add in one launch. Memory traffic: 8 bytes and
    one bit per element.
    """
    if not is_taken(out, levels):
        return NotImplemented
    tiles = _tiles(blocks, out.device)
    launch(
        _add_signs, len(tiles.rows), levels, packed, tiles.rows, out, weight,
        TWO=levels.shape[1] == 2, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return None


@triton.jit
def _sums_of(x, is_there):
    """(sum of elements >= 0, sum of the others, number of the former) of x; NaN is in the second sum."""
    is_above, wide = x >= 0, x.to(tl.float64)
    above = tl.sum(tl.where(is_above & is_there, wide, 0.0))
    below = tl.sum(tl.where(is_above, 0.0, wide))
    return above, below, tl.sum((is_above & is_there).to(tl.float64))


@triton.jit
def _sum_sides(x, rows, sums, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Write the `_sums_of` a tile, in float64."""
    tile = tl.program_id(0)
    row, place = rows + tile.to(tl.int64) * 4, tl.arange(0, TILE)
    start, numel = tl.load(row), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    x += start + place
    if numel == TILE:
        above, below, count = _sums_of(load(x, None), place < TILE)
    else:
        above, below, count = _sums_of(load(x, place < numel), place < numel)
    tl.store(sums + tile * 3, above)
    tl.store(sums + tile * 3 + 1, below)
    tl.store(sums + tile * 3 + 2, count)


@triton.jit
def _set_levels(sums, spans, levels, LEVELS: tl.constexpr, STEP: tl.constexpr):
    """Write a level of a block from the sums of its tiles: the mean magnitude, or the mean of one side.

    Each program does one division: two in float64 would share a function, which needs a stack.
    """
    block = tl.program_id(0) // LEVELS
    span = spans + block.to(tl.int64) * 3
    tile, stop, numel = tl.load(span), tl.load(span + 1), tl.load(span + 2).to(tl.float64)
    place = tl.arange(0, STEP)
    above, below, count = (
        tl.zeros((STEP,), tl.float64),
        tl.zeros((STEP,), tl.float64),
        tl.zeros((STEP,), tl.float64),
    )
    while tile < stop:
        here, mask = sums + (tile + place) * 3, place < stop - tile
        above += tl.load(here, mask, other=0.0)
        below += tl.load(here + 1, mask, other=0.0)
        count += tl.load(here + 2, mask, other=0.0)
        tile += STEP
    above_sum, below_sum, above_count = tl.sum(above), tl.sum(below), tl.sum(count)
    if LEVELS == 1:
        total, number = above_sum - below_sum, numel
    else:
        is_high = tl.program_id(0) % 2 == 0
        total = tl.where(is_high, above_sum, below_sum)
        number = tl.maximum(tl.where(is_high, above_count, numel - above_count), 1.0)
    tl.store(levels + tl.program_id(0), (total / number).to(tl.float32))


@triton.jit
def _levels_of(levels, block, TWO: tl.constexpr):
    """(level of a set bit, level of a cleared one) of a block."""
    if TWO:
        return tl.load(levels + block * 2), tl.load(levels + block * 2 + 1)
    else:
        high = tl.load(levels + block)
        return high, (high.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _pack_tile(x, packed, numel, high, low, mask, LEAVE: tl.constexpr, TILE: tl.constexpr):
    """Pack the bits of x >= 0 of a tile; with LEAVE, x keeps the rounding errors."""
    value = load(x, mask)
    is_one = value >= 0
    if mask is not None:
        is_one = is_one & mask
    weights = 1 << tl.arange(0, 8)[None, :]
    byte = tl.sum(tl.reshape(is_one.to(tl.int32), (TILE // 8, 8)) * weights, 1).to(tl.uint8)
    place = tl.arange(0, TILE // 8)
    if mask is None:
        tl.store(packed + place, byte)
    else:
        tl.store(packed + place, byte, place * 8 < numel)
    if LEAVE:
        tl.store(x, value - tl.where(is_one, high, low), mask)


@triton.jit
def _pack_signs(
    x, rows, levels, packed, TWO: tl.constexpr, LEAVE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """Pack the bits of x >= 0; with LEAVE, x keeps the rounding errors."""
    row, place = rows + tl.program_id(0).to(tl.int64) * 4, tl.arange(0, TILE)
    start, block, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    high, low = _levels_of(levels, block, TWO)
    x, packed = x + start + place, packed + byte
    if numel == TILE:
        _pack_tile(x, packed, numel, high, low, None, LEAVE, TILE)
    else:
        _pack_tile(x, packed, numel, high, low, place < numel, LEAVE, TILE)


@triton.jit
def _add_tile(out, packed, numel, high, low, mask, TILE: tl.constexpr):
    """Add the level of each bit of a tile: `high` or `low`."""
    place = tl.arange(0, TILE // 8)
    if mask is None:
        byte = tl.load(packed + place).to(tl.int32)
    else:
        byte = tl.load(packed + place, place * 8 < numel, other=0).to(tl.int32)
    bits = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, (TILE,))
    tl.store(out, load(out, mask) + tl.where(bits != 0, high, low), mask)


@triton.jit
def _add_signs(
    levels, packed, rows, out, weight, TWO: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """out += weight · the level of each bit."""
    row, place = rows + tl.program_id(0).to(tl.int64) * 4, tl.arange(0, TILE)
    start, block, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    high, low = _levels_of(levels, block, TWO)
    out, packed = out + start + place, packed + byte
    if numel == TILE:
        _add_tile(out, packed, numel, weight * high, weight * low, None, TILE)
    else:
        _add_tile(out, packed, numel, weight * high, weight * low, place < numel, TILE)
