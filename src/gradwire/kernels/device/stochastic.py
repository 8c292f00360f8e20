"""Stochastic rounding to levels: one pass if a bucket fits a program, else up to four.

A program holds either a few whole buckets as rows of a tile, and computes their steps as well; or a piece of
a longer bucket. For those, earlier launches find the largest magnitude, the sum of squares, and the step.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import bytes_at, bytes_from, load, magnitude, paired, parted, places_in
from gradwire.kernels.device.launch import TILE, WARPS, is_taken, launch
from gradwire.kernels.device.tables import QUAD, Tiles, block_spans, coded_tiles
from gradwire.kernels.layouts import Grid
from gradwire.kernels.noise import halves
from gradwire.kernels.stochastic import largest_step

_INFINITY = tl.constexpr(0x7F800000)
_PIECE = 4096
"""Elements of the longest bucket that a program holds in registers, and of a piece of a longer one. The
contract adds as many squares in float32."""


class _Cut(NamedTuple):
    """Tiles of a unit, as a table on the device, and the constants of the compiled kernel."""

    tiles: Tiles
    constants: dict[str, int | bool]


def _cut(grid: Grid, codes: Tensor, whole: bool) -> _Cut:
    """Cut a unit into tiles: of whole buckets if `whole`, else of pieces of at most `_PIECE` elements."""
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
) -> None:
    """Twin of `gradwire.kernels.stochastic.quantize`. Quantize in one launch, or in up to four where buckets
    are long or clipped.

    Memory traffic per element, with codes of 8 bits: 9 bytes, 5 without `subtract`, and 4 or 8 more for long
    or clipped buckets.
    """
    if not is_taken(x, steps) or not codes.is_contiguous():
        return NotImplemented
    whole = grid.width <= _PIECE and grid.clip == math.inf
    tiles, constants = _cut(grid, codes, whole)
    limits = float(grid.levels), largest_step(x.dtype, grid.levels)
    # Without steps that are there already their place is taken by what no program reads.
    tops = steps if whole else _find_steps(x, grid, tiles, steps, limits)
    launch(
        _quantize, len(tiles.rows), x, tiles.rows, tops, steps, codes, *map(_signed, halves(key)),
        *limits, STEPPED=not whole, EUCLIDEAN=grid.norm == "l2", SUBTRACT=subtract, **constants,
    )  # fmt: skip
    return None


def add_quantized(steps: Tensor, codes: Tensor, grid: Grid, out: Tensor, weight: float) -> None:
    """Twin of `gradwire.kernels.stochastic.add_quantized`. Decode and add in one launch. Memory traffic: 9
    bytes per element, with codes of 8 bits.
    """
    if not is_taken(out, steps) or not codes.is_contiguous():
        return NotImplemented
    tiles, constants = _cut(grid, codes, grid.width <= _PIECE)
    launch(_add_quantized, len(tiles.rows), steps, codes, tiles.rows, out, weight, **constants)
    return None


def _find_steps(x: Tensor, grid: Grid, tiles: Tiles, steps: Tensor, limits: tuple[float, float]) -> Tensor:
    """Compute the quantization step of every bucket, in two or three launches.

    Args:
        x: float32 (numel,), which is read only.
        grid: buckets, norm and clipping.
        tiles: stretches of x, of a program each.
        steps: float32 (buckets,), written.
        limits: the number of levels, and the largest step.

    Returns the largest magnitudes (buckets,), as bits in int32.
    """
    tops = torch.zeros(grid.buckets, dtype=torch.int32, device=x.device)
    spans = block_spans(grid.sizes, grid.width, _PIECE, x.device)
    sums = torch.empty(len(tiles.rows), dtype=torch.float32, device=x.device)
    pieces = {"ALIGNED": tiles.aligned, "TILE": _PIECE}
    launch(_find_tops, len(tiles.rows), x, tiles.rows, tops, **pieces)
    summed = grid.norm == "l2" or grid.clip < math.inf
    if summed:
        # A warp for each: its 32 threads have two lanes each.
        launch(_sum_squares, len(tiles.rows), x, tiles.rows, tops, sums, **pieces, num_warps=1)
    launch(
        _set_steps, grid.buckets, tops, sums, spans, steps, *limits,
        EUCLIDEAN=grid.norm == "l2", CLIP=grid.clip, SUMMED=summed, num_warps=1,
    )  # fmt: skip
    return tops


def _signed(word: int) -> int:
    """Reinterpret a 32-bit word as int32. Larger integers would be passed to a kernel as 64 bits."""
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def _words_of(index, low, high):
    """Random words for indices and the two halves of a key, all uint32; equal to the contract's
    `random_words`.
    """
    h = index * 0x9E3779B1 + low
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = h ^ high
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _powers_of(top):
    """(2^e, 2^-e) for a largest magnitude `top`, given as bits, such that 2^e · top is near 1.

    Both are in the normal range.
    """
    exponent = tl.minimum(tl.maximum(254 - (top >> 23), 1), 253)
    down, up = exponent << 23, (254 - exponent) << 23
    return down.to(tl.float32, bitcast=True), up.to(tl.float32, bitcast=True)


@triton.jit
def _is_coded(top):
    """True if `top`, the largest magnitude of a bucket as bits, is a positive finite number."""
    return (top > 0) & (top < _INFINITY)


@triton.jit
def _step_of(top, norm, levels, most):
    """Step between neighbouring levels of a bucket, as float32.

    Args:
        top: the bucket's largest magnitude, as bits.
        norm: norm of 2^e · x, with the 2^e of `_powers_of`.
        levels: number of positive levels.
        most: largest step.

    Returns 0 for a bucket of zeros, and NaN for one with NaN or Inf.
    """
    down, up = _powers_of(top)
    near = tl.div_rn(norm, levels)
    step = tl.minimum(near * up, most)
    # Below the normal range `up` may have rounded the step down: the next number then.
    bits = step.to(tl.int32, bitcast=True) + ((step * down < near) & (step < most)).to(tl.int32)
    bits = tl.where(_is_coded(top), bits, tl.where(top == 0, 0, 0x7FC00000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _squares_of(x, down, numel, mask, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares of the rows of a tile, in the order of summation of the contract.

    Args:
        x: pointer to the tile: ROWS rows of BLOCK elements, at most 4096.
        down: (ROWS,), powers of two by which elements are multiplied before they are squared.
        numel: elements from the start of the tile to the end of the tensor.
        mask: None if all rows are full.

    Returns (ROWS,) float32.
    """
    LANES: tl.constexpr = 64
    row, lane = tl.arange(0, ROWS)[:, None] * BLOCK, tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, BLOCK, LANES):
        # Once more from the cache: registers are not cut into lanes.
        place = row + first + lane
        if mask is None:
            y = load(x + place, None) * down[:, None]
        else:
            y = load(x + place, (first + lane < BLOCK) & (place < numel)) * down[:, None]
        lanes += y * y
    # A sum of two is the same in any order.
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 32)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 16)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 4)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 2)), 1)
    return tl.sum(lanes, 1)


@triton.jit
def _packed_of(code, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Pack codes (ROWS, WIDTH) of BITS bits, in int32, into bytes, the first in the lowest bits."""
    code = code & ((1 << BITS) - 1)
    if BITS == 4:
        code = paired(code, 4, ROWS, WIDTH)
    if BITS == 2:
        code = paired(paired(code, 2, ROWS, WIDTH), 4, ROWS, WIDTH // 2)
    return code.to(tl.uint8)


@triton.jit
def _codes_in(byte, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Inverse of `_packed_of`: signed codes (ROWS, WIDTH) in int32."""
    code = byte.to(tl.int32)
    if BITS == 4:
        code = parted(code, 4, ROWS, WIDTH)
    if BITS == 2:
        code = parted(parted(code, 4, ROWS, WIDTH // 2), 2, ROWS, WIDTH)
    return (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))


@triton.jit
def _quantize_tile(
    x, index, tops, steps, codes, low, high, levels, most, numel, mask, row_mask,
    STEPPED: tl.constexpr, EUCLIDEAN: tl.constexpr, SUBTRACT: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of x (a pointer): write its codes, and its steps unless STEPPED.

    `index` is the number of the tile's first element, with which its noise is drawn.
    """
    place, row = places_in(numel, ROWS, BLOCK, WIDTH)[0], tl.arange(0, ROWS)
    value = load(x + place, mask)
    if STEPPED:
        top = tl.load(tops + row)
        down, _up = _powers_of(top)
    else:
        top = tl.max(magnitude(value), 1)
        down, _up = _powers_of(top)
        norm = top.to(tl.float32, bitcast=True) * down
        if EUCLIDEAN:
            norm = tl.sqrt(_squares_of(x, down, numel, mask, ROWS, BLOCK).to(tl.float64)).to(tl.float32)
        tl.store(steps + row, _step_of(top, norm, levels, most), row_mask)
        # What follows would otherwise be laid out as sums of squares are, in more registers than there are.
        tl.debug_barrier()
    step = load(steps + row, row_mask)
    # In fixed point with 24 bits after the point.
    one = tl.full((ROWS,), 16777216.0, tl.float32)
    per_step = tl.div_rn(one, tl.where(_is_coded(top), step * down, 1.0))
    level, end = (value * down[:, None]) * per_step[:, None], levels * 16777216.0
    level = tl.minimum(tl.maximum(level, -end), end).to(tl.int32)
    noise = _words_of(index + place.to(tl.uint32), low, high) >> 8
    code = tl.where(_is_coded(top)[:, None], (level + noise.to(tl.int32)) >> 24, 0)
    to, here = bytes_at(numel, ROWS, BLOCK, WIDTH, 8 // BITS)
    if mask is None:
        tl.store(codes + to, _packed_of(code, ROWS, WIDTH, BITS))
    else:
        tl.store(codes + to, _packed_of(code, ROWS, WIDTH, BITS), here)
    if SUBTRACT:
        tl.store(x + place, value - step[:, None] * code.to(tl.float32), mask)


@triton.jit(do_not_specialize=["low", "high"])
def _quantize(
    x, rows, tops, steps, codes, low, high, levels, most, STEPPED: tl.constexpr, EUCLIDEAN: tl.constexpr,
    SUBTRACT: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantize one tile: ROWS whole buckets, or with STEPPED a piece of one bucket.

    Args:
        x: pointer to the tensor; with SUBTRACT the decoded values are subtracted from it.
        rows: the table of tiles: (first element, first bucket, first byte of the codes, elements) of each.
        tops: largest magnitudes of the buckets, as bits; read with STEPPED only.
        steps: steps of the buckets: read with STEPPED, else written.
        codes: pointer to the packed codes, written.
        low, high: halves of the hashed key of the noise.
        levels, most: number of positive levels, and the largest step.
    """
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    index, low, high = start.to(tl.uint32), low.to(tl.uint32), high.to(tl.uint32)
    _place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    x, tops, steps, codes = x + start, tops + number, steps + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (BLOCK % 64 == 0) & (numel == ROWS * BLOCK):
        _quantize_tile(
            x, index, tops, steps, codes, low, high, levels, most, numel, None, None,
            STEPPED, EUCLIDEAN, SUBTRACT, BITS, ROWS, BLOCK, WIDTH,
        )  # fmt: skip
    else:
        _quantize_tile(
            x, index, tops, steps, codes, low, high, levels, most, numel, mask, row_mask,
            STEPPED, EUCLIDEAN, SUBTRACT, BITS, ROWS, BLOCK, WIDTH,
        )  # fmt: skip


@triton.jit
def _find_tops(x, rows, tops, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Raise tops[bucket], the largest magnitude as bits, to that of one piece of the bucket."""
    row, place = rows + tl.program_id(0).to(tl.int64) * 4, tl.arange(0, TILE)
    start, number, numel = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    if numel == TILE:
        value = load(x + start + place, None)
    else:
        value = load(x + start + place, place < numel)
    tl.atomic_max(tops + number, tl.max(magnitude(value)), sem="relaxed")


@triton.jit
def _sum_squares(x, rows, tops, sums, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Write the sum of squares of one piece to `sums`, float32, scaled as in `_squares_of`."""
    tile = tl.program_id(0)
    row = rows + tile.to(tl.int64) * 4
    start, number, numel = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    down, _up = _powers_of(tl.load(tops + number + tl.arange(0, 1)))
    if numel == TILE:
        total = _squares_of(x + start, down, numel, None, 1, TILE)
    else:
        total = _squares_of(x + start, down, numel, 1, 1, TILE)
    tl.store(sums + tile + tl.arange(0, 1), total)


@triton.jit
def _set_steps(
    tops, sums, spans, steps, levels, most, EUCLIDEAN: tl.constexpr, CLIP: tl.constexpr, SUMMED: tl.constexpr
):
    """Write the step of a bucket. The sums of its pieces are added in order, in float64."""
    number = tl.program_id(0)
    top = tl.load(tops + number)
    down, _up = _powers_of(top)
    norm = top.to(tl.float32, bitcast=True) * down
    if SUMMED:
        span = spans + number.to(tl.int64) * 3
        tile, stop, numel = tl.load(span), tl.load(span + 1), tl.load(span + 2)
        total = tl.zeros((), tl.float64)
        while tile < stop:
            total += tl.load(sums + tile).to(tl.float64)
            tile += 1
        if EUCLIDEAN:
            norm = tl.sqrt(total).to(tl.float32)
        else:
            norm = tl.minimum(norm, (CLIP * tl.sqrt(total / numel.to(tl.float64))).to(tl.float32))
    tl.store(steps + number, _step_of(top, norm, levels, most))


@triton.jit
def _add_tile(
    out, steps, codes, weight, numel, mask, row_mask,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out += weight · (step · code) on a tile."""
    place = places_in(numel, ROWS, BLOCK, WIDTH)[0]
    to, here = bytes_at(numel, ROWS, BLOCK, WIDTH, 8 // BITS)
    if mask is None:
        byte = tl.load(codes + to)
    else:
        byte = tl.load(codes + to, here, other=0)
    code, step = _codes_in(byte, ROWS, WIDTH, BITS), load(steps + tl.arange(0, ROWS), row_mask)
    value = weight * (step[:, None] * code.to(tl.float32))
    tl.store(out + place, load(out + place, mask) + value, mask)


@triton.jit
def _add_quantized(
    steps, codes, rows, out, weight, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out += weight · step · code on a tile of buckets, or on a piece of one."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    _place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    out, steps, codes = out + start, steps + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        _add_tile(out, steps, codes, weight, numel, None, None, BITS, ROWS, BLOCK, WIDTH)
    else:
        _add_tile(out, steps, codes, weight, numel, mask, row_mask, BITS, ROWS, BLOCK, WIDTH)
