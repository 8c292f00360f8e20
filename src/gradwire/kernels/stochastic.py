"""Stochastic rounding to evenly spaced levels, packed. Kernels give the same bits.

Computed per bucket, in float32 (float64 for float64):

1. y = 2^e · x, where e follows from the exponent of the largest magnitude m, so that squares neither overflow
   nor vanish. A power of two on x changes nothing but e.
2. norm = m, or √Σy²; step = norm / levels, rounded up where 2^-e takes it below the normal range.
3. code = ⌊y / step + noise⌋, with noise uniform in 0 … 1 - 2^-24. In fixed point with 24 bits after the point
   this is exact: unbiased but for the rounding of y / step.

Squares are added in the kernels' order: 64 lanes, blocks of 4096 elements.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.layouts import Grid, pack_codes, packed_bytes, unpack_codes
from gradwire.kernels.noise import random_words

_BLOCK, _LANES = 4096, 64
_ONE = 2.0**24
_FORMATS = {torch.float32: (23, torch.int32), torch.float64: (52, torch.int64)}
"""Mantissa bits of each float type, and the integer type of its width."""


def _fit(x: Tensor, grid: Grid, key: int, steps: Tensor, codes: Tensor, *, subtract: bool = False) -> None:
    grid.check(x, steps, codes)


def _fit_sum(steps: Tensor, codes: Tensor, grid: Grid, out: Tensor, weight: float) -> None:
    grid.check(out, steps, codes)


@contract(_fit)
def quantize(
    x: Tensor, grid: Grid, key: int, steps: Tensor, codes: Tensor, *, subtract: bool = False
) -> None:
    """Quantize x (numel,): write steps (grid.buckets,) and packed codes (grid.code_bytes,) uint8.

    Element i of the unit is rounded up or down at random, unbiased, with word i of `key` (`random_words`).
    With `subtract`, x is overwritten with its rounding errors. NaN or Inf makes the step of its bucket NaN. A
    Euclidean norm is cut where levels would exceed the range of x's type.

    >>> x, grid = torch.tensor([3.0, -3.0, 0.0]), Grid((3,), None, bits=8, norm="max")
    >>> steps, codes = torch.empty(1), torch.empty(3, dtype=torch.uint8)
    >>> quantize(x, grid, 7, steps, codes)
    >>> 127 * steps, codes.view(torch.int8)
    (tensor([3.]), tensor([ 127, -127,    0], dtype=torch.int8))
    """
    most = largest_step(x.dtype, grid.levels)
    start = number = place = 0
    for size in filter(None, grid.sizes):
        width = min(grid.width, size)
        rows = in_rows(x[start : start + size].to(steps.dtype), width)
        noise = in_rows(random_words(key, size, start, x.device) >> 8, width)
        down, near, step = _steps(rows, size, grid, most)
        packed = _packed(_codes(rows * down[:, None], near[:, None], noise, grid), size, grid)
        steps[number : number + step.numel()] = step
        codes[place : place + packed.numel()] = packed
        start, number, place = start + size, number + step.numel(), place + packed.numel()
    if subtract:
        add_quantized.plain(steps, codes, grid, x, -1.0)


@contract(_fit_sum)
def add_quantized(steps: Tensor, codes: Tensor, grid: Grid, out: Tensor, weight: float) -> None:
    """out (numel,) += weight · step · code, with steps and codes that `quantize` wrote.

    >>> out = torch.ones(2)
    >>> codes = torch.tensor([3, -4], dtype=torch.int8).view(torch.uint8)
    >>> add_quantized(torch.tensor([0.5]), codes, Grid((2,), None, bits=8), out, 2.0)
    >>> out
    tensor([ 4., -3.])
    """
    start = number = place = 0
    for size in filter(None, grid.sizes):
        width = min(grid.width, size)
        rows, taken = -(-size // width), _bytes(size, width, grid)
        code = _unpacked(codes[place : place + taken], width, grid)
        value = steps[number : number + rows, None] * code.to(steps.dtype)
        out[start : start + size] += weight * value.reshape(-1)[:size].to(out.dtype)
        start, number, place = start + size, number + rows, place + taken


@lru_cache
def largest_step(dtype: torch.dtype, levels: int) -> float:
    """Largest step whose top level, `levels` steps, is finite in `dtype`."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    largest = torch.finfo(dtype).max
    step = torch.tensor(largest / levels, dtype=work, device="cpu")
    if float(step * levels) > largest:
        step = torch.nextafter(step, torch.zeros((), dtype=work, device="cpu"))
    return float(step)


def in_rows(x: Tensor, width: int) -> Tensor:
    """Reshape x (n,) to (rows, width); the last row is padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)


def _steps(rows: Tensor, size: int, grid: Grid, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of each row, (rows,) each: 2^e, the step of 2^e · x, and the step of x.

    `rows` (rows, width) are the `size` elements of a part, a row per bucket. `most` is the largest step.
    """
    magnitude = rows.abs().amax(1)
    down, up = _powers(magnitude)
    norm = magnitude * down
    if grid.norm == "l2":
        norm = _sum_squares(rows * down[:, None]).sqrt().to(rows.dtype)
    elif grid.clip < torch.inf:
        counts = torch.full_like(norm, rows.shape[1], dtype=torch.float64)
        counts[-1] = size - (rows.shape[0] - 1) * rows.shape[1]
        mean = _sum_squares(rows * down[:, None]) / counts
        norm = norm.minimum((grid.clip * mean.sqrt()).to(rows.dtype))
    # A tensor, because a division by a number may be a multiplication by its rounded reciprocal.
    near = norm / torch.full_like(norm, grid.levels)
    step = (near * up).clamp(max=most)
    # Below the normal range `up` may have rounded the step down, and the top level with it.
    short = (step * down < near) & (step < most)
    step = torch.where(short, step.nextafter(torch.full_like(step, most)), step)
    step = step.masked_fill(~magnitude.isfinite(), torch.nan)
    return down, step * down, step


def _powers(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Powers of two 2^e that bring `magnitude` (rows,) near 1, and their inverses; both in the normal
    range.
    """
    mantissa, integer = _FORMATS[magnitude.dtype]
    bias = 127 if mantissa == 23 else 1023
    exponent = (2 * bias - (magnitude.view(integer) >> mantissa)).clamp(1, 2 * bias - 1)
    down, up = exponent << mantissa, (2 * bias - exponent) << mantissa
    return down.view(magnitude.dtype), up.view(magnitude.dtype)


def _sum_squares(y: Tensor) -> Tensor:
    """Sum Σy² of each row of y (rows, width): (rows,) float64, in the kernels' order."""
    total = torch.zeros(y.shape[0], dtype=torch.float64, device=y.device)
    squares = torch.nn.functional.pad(y * y, (0, -y.shape[1] % _LANES))
    for start in range(0, squares.shape[1], _BLOCK):
        stop = min(start + _BLOCK, squares.shape[1])
        lanes = torch.zeros_like(squares[:, :_LANES])
        for place in range(start, stop, _LANES):
            lanes = lanes + squares[:, place : place + _LANES]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        total += lanes[:, 0].double()
    return total


def _codes(y: Tensor, near: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """Codes ⌊y / near + noise⌋ as int64; 0 in rows that are zero or not finite."""
    end = grid.levels * _ONE
    levels = (y * (_ONE / near)).clamp(-end, end)
    # Of a row of zeros 0 · ∞ is left, of one that is not finite NaN: nothing else makes one.
    codes = (levels.nan_to_num(0.0).long() + noise) >> 24
    return codes * (near.isfinite() & (near > 0))


def _bytes(size: int, width: int, grid: Grid) -> int:
    """Bytes of the codes of `size` elements in rows of `width`; each row begins a new byte."""
    full, rest = divmod(size, width)
    return full * packed_bytes(width, grid.bits) + packed_bytes(rest, grid.bits)


def _packed(codes: Tensor, size: int, grid: Grid) -> Tensor:
    """Pack codes (rows, width) of `size` elements into bytes; the padding of the last row is left out."""
    width = codes.shape[1]
    filled = torch.nn.functional.pad(codes & ((1 << grid.bits) - 1), (0, -width % (8 // grid.bits)))
    return pack_codes(filled.reshape(-1), grid.bits)[: _bytes(size, width, grid)]


def _unpacked(packed: Tensor, width: int, grid: Grid) -> Tensor:
    """Unpack codes that `_packed` packed: (rows, width) int64; the last row is padded with zeros."""
    filled = in_rows(packed, packed_bytes(width, grid.bits))
    codes = unpack_codes(filled.reshape(-1), grid.bits, filled.numel() * 8 // grid.bits)
    signed = codes - ((codes > grid.levels).long() << grid.bits)
    return signed.view(filled.shape[0], -1)[:, :width]
