"""Blocks in 8 or 4 bits each, with a scale per block: a program has a few whole blocks as rows of a tile.

All of a block is in registers: maximum, rounding, subtraction and packing read it once.
"""

import triton
import triton.language as tl

from gradwire.kernels.device.bodies.common import (
    bytes_at,
    bytes_from,
    load,
    magnitude,
    paired,
    parted,
    places_in,
)

INT8, INT4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def scale_of(maximum, largest):
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
def to_fp8(value):
    """e4m3 in int32, ties to even: 4 bits of exponent with bias 7, 3 of mantissa.

    A sum with 2^14 is a multiple of 2^-9, the step of what is below 2^-6.
    """
    bits = magnitude(value)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    tiny = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(bits >= 0x3C800000, normal, tiny) | sign


@triton.jit
def from_fp8(code):
    """The number that the lowest 8 bits of int32 are in e4m3."""
    value = (((code & 0x7F) << 20) + (960 << 20)).to(tl.float32, bitcast=True)
    # An exponent of 0 stands for the same step as 1, and for no leading one.
    value = tl.where((code & 0x78) != 0, value, 2.0 * value - 0.015625)
    # The sign as a bit: Triton's minus is 0 - x, which has no -0.
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(code, KIND: tl.constexpr):
    """Codes in int32 as float32."""
    if KIND == FP8:
        return from_fp8(code)
    else:
        return code.to(tl.float32)


@triton.jit
def codes_of(x, scale, positive, KIND: tl.constexpr):
    """Codes in int32 of a tile (blocks, elements), 0 in blocks whose scale is no positive number."""
    quotient = tl.div_rn(x, tl.where(positive, scale, 1.0)[:, None])
    if KIND == FP8:
        code = to_fp8(quotient)
    else:
        # A sum with 1.5 · 2^23 has no fraction: its lowest bits are the nearest integer.
        code = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(positive[:, None], code, 0)


@triton.jit
def store_codes(
    codes, code, mask, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """Write a tile's codes from int32."""
    place, here = bytes_at(numel, ROWS, BLOCK, WIDTH, 2 if KIND == INT4 else 1)
    if KIND == INT4:
        code = paired(code & 15, 4, ROWS, WIDTH)
    if mask is None:
        tl.store(codes + place, (code & 255).to(tl.uint8))
    else:
        tl.store(codes + place, (code & 255).to(tl.uint8), here)


@triton.jit
def load_codes(
    codes, mask, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """A tile of codes in int32, signed where they are integers."""
    place, here = bytes_at(numel, ROWS, BLOCK, WIDTH, 2 if KIND == INT4 else 1)
    if mask is None:
        code = tl.load(codes + place).to(tl.int32)
    else:
        code = tl.load(codes + place, here, other=0).to(tl.int32)
    if KIND == INT4:
        code = (parted(code, 4, ROWS, WIDTH) ^ 8) - 8
    if KIND == INT8:
        code = (code ^ 128) - 128
    return code


@triton.jit
def encode_tile(
    x, left, scales, codes, factor, largest, numel, mask, row_mask,
    LEFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scales and codes of x; with LEFT, left = x - decoded, or with a factor left += factor · it."""
    scale, positive = scale_of(tl.max(magnitude(x), 1), largest)
    code = codes_of(x, scale, positive, KIND)
    tl.store(scales + tl.arange(0, ROWS), scale, row_mask)
    store_codes(codes, code, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    if LEFT:
        rest = x - scale[:, None] * numbers_of(code, KIND)
        if factor is not None:
            rest = load(left, mask) + rest * factor
        tl.store(left, rest, mask)


@triton.jit
def encode_blocks(
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
        encode_tile(
            load(x, None), x, scales, codes, None, largest, numel, None, None, LEFT, ROWS, BLOCK, WIDTH, KIND
        )
    else:
        encode_tile(
            load(x, mask), x, scales, codes, None, largest, numel, mask, row_mask,
            LEFT, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip


@triton.jit
def decoded(
    scales, codes, numel, mask, row_mask,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A tile (ROWS, WIDTH) of scale · code."""
    code = load_codes(codes, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    return load(scales + tl.arange(0, ROWS), row_mask)[:, None] * numbers_of(code, KIND)


@triton.jit
def decode_blocks(
    scales, codes, rows, out, weight, ADD: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = weight · (scale · code), or with ADD out += it."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    out, scales, codes = out + start + place, scales + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        value = weight * decoded(scales, codes, numel, None, None, ROWS, BLOCK, WIDTH, KIND)
        before = load(out, None) if ADD else 0.0  # a sum turns -0 into 0, with either
        tl.store(out, before + value)
    else:
        value = weight * decoded(scales, codes, numel, mask, row_mask, ROWS, BLOCK, WIDTH, KIND)
        before = load(out, mask) if ADD else 0.0
        tl.store(out, before + value, mask)


@triton.jit
def sum_of(
    scales, codes, scale_stride, code_stride, world, weight, numel, mask, row_mask,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A tile of Σ weight · (scale · code) over ranks, in their order."""
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    rank = 0
    while rank < world:
        total += weight * decoded(scales, codes, numel, mask, row_mask, ROWS, BLOCK, WIDTH, KIND)
        scales, codes, rank = scales + scale_stride, bytes_from(codes, code_stride, ALIGNED), rank + 1
    return total


@triton.jit(do_not_specialize=["world"])
def reduce_blocks(
    scales, codes, scale_stride, code_stride, world, weight, rows, own_scales, own_codes, unsent, share,
    largest, LEFT: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of Σ weight · decoded over ranks; with LEFT, unsent += share · what they do not say of it."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    unsent, scales, codes = unsent + start + place, scales + number, bytes_from(codes, byte, ALIGNED)
    own_scales, own_codes = own_scales + number, bytes_from(own_codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        total = sum_of(
            scales, codes, scale_stride, code_stride, world, weight, numel, None, None,
            ALIGNED, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
        encode_tile(
            total, unsent, own_scales, own_codes, share, largest, numel, None, None,
            LEFT, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
    else:
        total = sum_of(
            scales, codes, scale_stride, code_stride, world, weight, numel, mask, row_mask,
            ALIGNED, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
        encode_tile(
            total, unsent, own_scales, own_codes, share, largest, numel, mask, row_mask,
            LEFT, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
