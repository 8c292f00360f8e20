"""Blocks in a few bits, each with a scale: one pass, with what is left.

A program has a few whole blocks as rows of a tile, all in registers: maximum, rounding, subtraction and
packing read it once.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import bytes_at, bytes_from, load, magnitude, paired, parted, places_in
from gradwire.kernels.device.launch import TILE, WARPS, is_taken, launch
from gradwire.kernels.device.tables import QUAD, coded_tiles
from gradwire.kernels.layouts import LARGEST, ScaledBlocks

_KINDS = {"int8": 0, "int4": 1, "fp8": 2}
_INT8, _INT4, _FP8 = map(tl.constexpr, _KINDS.values())
_LONGEST = 8192
"""Elements of the longest block that a program keeps in registers."""


class _Cut(NamedTuple):
    """How blocks are cut into tiles, and what of it is constant in compiled code."""

    rows: Tensor
    constants: dict[str, int | bool]


def _cut(blocks: ScaledBlocks, codes: Tensor) -> _Cut:
    """For codes that lie there: after scales, so that 4 is all that their address need be a multiple of."""
    width = max(2, 1 << (blocks.block - 1).bit_length())
    rows = max(1, TILE // width)
    bits = 4 if blocks.kind == "int4" else 8
    tiles = coded_tiles(blocks.sizes, blocks.block, bits, rows, None, codes.device)
    aligned = tiles.aligned and tiles.bytes_aligned and not codes.data_ptr() % QUAD
    constants = {
        "KIND": _KINDS[blocks.kind], "ALIGNED": aligned, "ROWS": rows, "BLOCK": blocks.block,
        "WIDTH": width, "num_warps": max(WARPS, width // 512),
    }  # fmt: skip
    return _Cut(tiles.rows, constants)


def encode_blocks(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool) -> None:
    """9 bytes an element (int4 8.5) with what is left, 5 without."""
    if not is_taken(x, scales) or blocks.block > _LONGEST:
        return NotImplemented
    cut = _cut(blocks, codes)
    launch(
        _encode_blocks, len(cut.rows), x, cut.rows, scales, codes, LARGEST[blocks.kind],
        LEFT=left, **cut.constants,
    )  # fmt: skip
    return None


def add_blocks(scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float) -> None:
    """9 bytes an element."""
    if not is_taken(out, scales) or blocks.block > _LONGEST:
        return NotImplemented
    cut = _cut(blocks, codes)
    launch(_add_blocks, len(cut.rows), scales, codes, cut.rows, out, weight, **cut.constants)
    return None


@triton.jit
def _scale_of(maximum, largest):
    """(scale, whether it is a positive number) of blocks with these maxima, which are bits of float32.

    Rounded towards zero, so that the largest code decodes to no more than the maximum and cannot overflow;
    below the normal range upwards, so that no code is larger than the largest. 0 of zeros, else NaN.
    """
    top = maximum.to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, largest)
    back, bits = scale * largest, scale.to(tl.int32, bitcast=True)
    tiny = bits < 0x00800000
    bits += tl.where(tiny & (back < top), 1, 0) - tl.where((bits >= 0x00800000) & (back > top), 1, 0)
    positive = (maximum > 0) & (maximum < 0x7F800000)
    bits = tl.where(positive, bits, tl.where(maximum == 0, 0, 0x7FC00000))
    return bits.to(tl.float32, bitcast=True), positive


@triton.jit
def _to_fp8(value):
    """e4m3 in int32, ties to even: 4 bits of exponent with bias 7, 3 of mantissa.

    A sum with 2^14 is a multiple of 2^-9, the step of what is below 2^-6.
    """
    bits = magnitude(value)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    tiny = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(bits >= 0x3C800000, normal, tiny) | sign


@triton.jit
def _from_fp8(code):
    """The number that the lowest 8 bits of int32 are in e4m3."""
    value = (((code & 0x7F) << 20) + (960 << 20)).to(tl.float32, bitcast=True)
    # An exponent of 0 stands for the same step as 1, and for no leading one.
    value = tl.where((code & 0x78) != 0, value, 2.0 * value - 0.015625)
    # The sign as a bit: Triton's minus is 0 - x, which has no -0.
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _numbers_of(code, KIND: tl.constexpr):
    """Codes in int32 as float32."""
    if KIND == _FP8:
        return _from_fp8(code)
    else:
        return code.to(tl.float32)


@triton.jit
def _codes_of(x, scale, positive, KIND: tl.constexpr):
    """Codes in int32 of a tile (blocks, elements), 0 in blocks whose scale is no positive number."""
    quotient = tl.div_rn(x, tl.where(positive, scale, 1.0)[:, None])
    if KIND == _FP8:
        code = _to_fp8(quotient)
    else:
        # A sum with 1.5 · 2^23 has no fraction: its lowest bits are the nearest integer.
        code = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(positive[:, None], code, 0)


@triton.jit
def _store_codes(
    codes, code, mask, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """Write a tile's codes from int32."""
    place, here = bytes_at(numel, ROWS, BLOCK, WIDTH, 2 if KIND == _INT4 else 1)
    if KIND == _INT4:
        code = paired(code & 15, 4, ROWS, WIDTH)
    if mask is None:
        tl.store(codes + place, (code & 255).to(tl.uint8))
    else:
        tl.store(codes + place, (code & 255).to(tl.uint8), here)


@triton.jit
def _load_codes(
    codes, mask, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """A tile of codes in int32, signed where they are integers."""
    place, here = bytes_at(numel, ROWS, BLOCK, WIDTH, 2 if KIND == _INT4 else 1)
    if mask is None:
        code = tl.load(codes + place).to(tl.int32)
    else:
        code = tl.load(codes + place, here, other=0).to(tl.int32)
    if KIND == _INT4:
        code = (parted(code, 4, ROWS, WIDTH) ^ 8) - 8
    if KIND == _INT8:
        code = (code ^ 128) - 128
    return code


@triton.jit
def _encode_tile(
    to, scales, codes, largest, numel, mask, row_mask,
    LEFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scales and codes of the tile at `to`; with LEFT, it keeps what they do not say."""
    x = load(to, mask)
    scale, positive = _scale_of(tl.max(magnitude(x), 1), largest)
    code = _codes_of(x, scale, positive, KIND)
    tl.store(scales + tl.arange(0, ROWS), scale, row_mask)
    _store_codes(codes, code, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    if LEFT:
        tl.store(to, x - scale[:, None] * _numbers_of(code, KIND), mask)


@triton.jit
def _encode_blocks(
    x, rows, scales, codes, largest, LEFT: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scales and codes of the blocks of x; with LEFT, x keeps what they do not say."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    x, scales, codes = x + start + place, scales + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        _encode_tile(x, scales, codes, largest, numel, None, None, LEFT, ROWS, BLOCK, WIDTH, KIND)
    else:
        _encode_tile(x, scales, codes, largest, numel, mask, row_mask, LEFT, ROWS, BLOCK, WIDTH, KIND)


@triton.jit
def _decoded(
    scales, codes, numel, mask, row_mask,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A tile (ROWS, WIDTH) of scale · code."""
    code = _load_codes(codes, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    return load(scales + tl.arange(0, ROWS), row_mask)[:, None] * _numbers_of(code, KIND)


@triton.jit
def _add_blocks(
    scales, codes, rows, out, weight, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out += weight · (scale · code)."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    out, scales, codes = out + start + place, scales + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        value = weight * _decoded(scales, codes, numel, None, None, ROWS, BLOCK, WIDTH, KIND)
        tl.store(out, load(out, None) + value)
    else:
        value = weight * _decoded(scales, codes, numel, mask, row_mask, ROWS, BLOCK, WIDTH, KIND)
        tl.store(out, load(out, mask) + value, mask)
