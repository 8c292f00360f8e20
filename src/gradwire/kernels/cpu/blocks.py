"""Blocks in a few bits, each with a scale: maximum, rounding, subtraction and packing in one pass.

A block stays in the first-level cache between the small loops, each of which vectorises. Blocks are rows of
two-dimensional arrays, because a slice per block would cost reference counts. Types are spelled out, because
Numba would otherwise widen 32-bit integers to 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import blocks as contracts
from gradwire.kernels.cpu.bits import INFINITY, MAGNITUDE
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.layouts import LARGEST, ScaledBlocks, ShardedBlocks
from gradwire.kernels.slices import side_by_side, threads_for

INT8, INT4, FP8 = 0, 1, 2
_KINDS = {"int8": INT8, "int4": INT4, "fp8": FP8}

_SMALLEST_NORMAL = np.float32(2.0**-126)
_NEAREST = np.float32(1.5 * 2.0**23)  # a sum with it has no fraction: its lowest bits are the nearest integer
# e4m3: 4 bits of exponent with bias 7, 3 of mantissa; below 2^-6 multiples of 2^-9.
_FP8_NORMAL = np.int32(0x3C800000)  # 2^-6
_FP8_STEP = np.float32(2.0**14)  # a sum with it is a multiple of 2^-9
_FP8_STEP_BITS = np.int32(0x46800000)
_FP8_BIAS = np.int32((127 - 7) << 3)
_HALF_BELOW = np.int32(0x7FFFF)  # one less than half of the last of 3 bits of mantissa


SMALLEST = 1 << 17
"""Fewest elements of a thread's share. Less, some 0.1 ms of encoding, does not repay the hand-over."""


class _Stretch(NamedTuple):
    """Neighbouring blocks as a unit of their own, and the slices of their elements, scales and bytes
    of codes.
    """

    blocks: ScaledBlocks
    x: slice
    scales: slice
    codes: slice


@lru_cache(maxsize=256)
def _stretches(blocks: ScaledBlocks, number: int) -> tuple[_Stretch, ...]:
    """Cut blocks into about `number` stretches of about equal size, each of whole blocks.

    >>> [(each.x, each.scales) for each in _stretches(ScaledBlocks((600, 300), 256, "int8"), 2)]
    [(slice(0, 512, None), slice(0, 2, None)), (slice(512, 900, None), slice(2, 5, None))]
    """
    block, kind = blocks.block, blocks.kind
    most = max(block, -(-blocks.numel // (number * block)) * block)
    found, sizes, left = list[ScaledBlocks](), list[int](), most
    for size in blocks.sizes:
        while size:
            if left < min(size, block):
                found.append(ScaledBlocks(tuple(sizes), block, kind))
                sizes, left = [], most
            taken = size if size <= left else left // block * block
            sizes.append(taken)
            left, size = left - taken, size - taken
    found.append(ScaledBlocks(tuple(sizes), block, kind))
    x, scales, codes = (
        list(accumulate(values, initial=0))
        for values in zip(*((each.numel, each.count, each.code_bytes) for each in found), strict=True)
    )
    places = (list(map(slice, starts, starts[1:])) for starts in (x, scales, codes))
    return tuple(map(_Stretch, found, *places))


def _in_stretches(
    shards: Iterable[tuple[int, ScaledBlocks]], number: int, work: Callable[[int, _Stretch], None]
) -> None:
    """Call `work` on stretches of all shards, with the number of the shard, on `number` threads.

    `shards` are pairs (number of a shard, its blocks).
    """
    numbered = list(shards)
    each = -(-number // len(numbered))
    jobs = [partial(work, shard, at) for shard, blocks in numbered for at in _stretches(blocks, each)]
    bounds = [len(jobs) * i // number for i in range(number + 1)]

    def run(some: Sequence[Callable[[], None]]) -> None:
        for job in some:
            job()

    side_by_side([partial(run, jobs[a:b]) for a, b in pairwise(bounds)])


def _in_row(data: NDArray[np.uint8], shard: ScaledBlocks, at: _Stretch) -> tuple[Any, Any]:
    """Views of the scales and codes of the stretch `at` of `shard`, whose row is at the beginning of
    `data`.
    """
    codes = data[4 * shard.count :]
    return data[4 * at.scales.start : 4 * at.scales.stop].view(np.float32), codes[at.codes]


def encode_blocks(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool) -> None:
    """Twin of `gradwire.kernels.blocks.encode_blocks`. Encode in one pass: maximum, rounding, subtraction and
    packing; in stretches on several threads if cores are free.
    """
    rule = blocks.block, _KINDS[blocks.kind], np.float32(LARGEST[blocks.kind])
    values, into, bytes_ = x.numpy(), scales.numpy(), codes.numpy()
    number = threads_for(blocks.numel, SMALLEST)
    if number == 1:
        _encode_blocks(values, blocks.array, *rule, into, bytes_, left)
        return

    def encode(_shard: int, at: _Stretch) -> None:
        _encode_blocks(values[at.x], at.blocks.array, *rule, into[at.scales], bytes_[at.codes], left)

    _in_stretches([(0, blocks)], number, encode)


def add_blocks(scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float) -> None:
    """Twin of `gradwire.kernels.blocks.add_blocks`. Decode and add in one pass; in stretches on several
    threads if cores are free.
    """
    rule = blocks.block, _KINDS[blocks.kind], np.float32(weight)
    values, of, bytes_ = out.numpy(), scales.numpy(), codes.numpy()
    number = threads_for(blocks.numel, SMALLEST)
    if number == 1:
        _add_blocks(of, bytes_, blocks.array, *rule, values)
        return

    def add(_shard: int, at: _Stretch) -> None:
        _add_blocks(of[at.scales], bytes_[at.codes], at.blocks.array, *rule, values[at.x])

    _in_stretches([(0, blocks)], number, add)


def encode_shards(x: Tensor, table: ShardedBlocks, rows: Tensor) -> None:
    """Twin of `gradwire.kernels.blocks.encode_shards`. Encode all shards in one call, or in stretches on
    several threads if cores are free.
    """
    first = table.shards[0]
    rule = first.block, _KINDS[first.kind], np.float32(LARGEST[first.kind])
    values, data, number = x.numpy(), rows.numpy(), threads_for(table.numel, SMALLEST)
    if number == 1:
        _encode_shards(values, table.array, table.table, *rule, data.reshape(-1), table.row_bytes)
        return
    starts = [start for start, _shard in table.starts()]

    def encode(shard: int, at: _Stretch) -> None:
        scales, codes = _in_row(data[shard], table.shards[shard], at)
        _encode_blocks(values[starts[shard] :][at.x], at.blocks.array, *rule, scales, codes, True)

    _in_stretches(enumerate(table.shards), number, encode)
    for row, blocks in zip(data, table.shards, strict=True):
        row[4 * blocks.count + blocks.code_bytes :] = 0


def decode_shards(rows: Tensor, table: ShardedBlocks, out: Tensor) -> None:
    """Twin of `gradwire.kernels.blocks.decode_shards`. Decode all shards in one call, or in stretches on
    several threads if cores are free.
    """
    out.zero_()
    first = table.shards[0]
    rule = first.block, _KINDS[first.kind]
    values, data, number = out.numpy(), rows.numpy(), threads_for(table.numel, SMALLEST)
    if number == 1:
        _add_shards(data.reshape(-1), table.row_bytes, table.array, table.table, *rule, values)
        return
    starts = [start for start, _shard in table.starts()]

    def add(shard: int, at: _Stretch) -> None:
        scales, codes = _in_row(data[shard], table.shards[shard], at)
        place = values[starts[shard] :][at.x]
        _add_blocks(scales, codes, at.blocks.array, *rule, np.float32(1.0), place)

    _in_stretches(enumerate(table.shards), number, add)


def sum_shard(rows: Tensor, table: ShardedBlocks, shard: int, out: Tensor, weight: float) -> None:
    """Twin of `gradwire.kernels.blocks.sum_shard`. Sum all rows in one call, or in stretches on several
    threads if cores are free.
    """
    blocks, by = table.shards[shard], np.float32(weight)
    values, data, number = out.numpy(), rows.numpy(), threads_for(blocks.numel * len(rows), SMALLEST)
    if number == 1:
        rule = blocks.array, blocks.count, blocks.code_bytes, blocks.block, _KINDS[blocks.kind]
        _sum_shard(data.reshape(-1), table.row_bytes, *rule, by, values)
        return

    def add(_shard: int, at: _Stretch) -> None:
        for row in data:
            scales, codes = _in_row(row, blocks, at)
            given = scales, codes, at.blocks.array, blocks.block, _KINDS[blocks.kind]
            _add_blocks(*given, by, values[at.x])

    _in_stretches([(shard, blocks)], number, add)


def average_shard(
    rows: Tensor, table: ShardedBlocks, shard: int, room: Tensor, unsent: Tensor | None
) -> Tensor:
    """Twin of `gradwire.kernels.blocks.average_shard`. One call sums all rows, and another encodes the mean;
    on several threads if cores are free.
    """
    return contracts.average_by(sum_shard, encode_blocks, rows, table, shard, room, unsent)


@kernel
def _largest_bits(bits: Any, row: Any) -> Any:
    """Largest magnitude of row `row`, as bits of float32; `bits` (blocks, block) int32 are those of the
    elements.
    """
    largest = np.int32(0)
    for i in range(bits.shape[1]):
        largest = max(largest, np.int32(bits[row, i] & MAGNITUDE))
    return largest


@kernel
def _set_scale(scales: Any, scale_bits: Any, row: Any, largest: Any) -> None:
    """Replace the maximum of a block in scales[row] by its scale; `scale_bits` is the same memory as int32.

    A scale in the normal range is rounded towards zero, so that the largest code decodes to no more than the
    maximum and cannot overflow. A subnormal scale is rounded up, so that no code exceeds `largest`.
    """
    maximum = scales[row]
    scale = maximum / largest
    scales[row] = scale
    if scale < _SMALLEST_NORMAL:
        if scale * largest < maximum:
            scale_bits[row] += 1
    elif scale * largest > maximum:
        scale_bits[row] -= 1


@kernel
def _round(x: Any, row: Any, scale: Any, floats: Any, bits: Any, codes: Any, to: Any) -> None:
    """Write row `row` of x, divided by `scale` and rounded to integers (ties to even), to row `to` of
    `codes`.

    `floats` and `bits` are one scratch memory, as float32 and int32.
    """
    for i in range(x.shape[1]):
        floats[0, i] = x[row, i] / scale + _NEAREST
    for i in range(x.shape[1]):
        codes[to, i] = np.int8(bits[0, i])


@kernel
def _subtract(x: Any, row: Any, scale: Any, codes: Any, of: Any) -> None:
    for i in range(x.shape[1]):
        x[row, i] -= scale * np.float32(codes[of, i])


@kernel
def _add(out: Any, row: Any, scale: Any, weight: Any, codes: Any, of: Any) -> None:
    for i in range(out.shape[1]):
        out[row, i] += weight * (scale * np.float32(codes[of, i]))


@kernel
def _to_fp8(x: Any, row: Any, scale: Any, floats: Any, bits: Any, codes: Any) -> None:
    """Write row `row` of x, divided by `scale` and rounded to e4m3 (ties to even), to row `row` of `codes`.

    `floats` and `bits` (2, block) are one scratch memory, as float32 and int32.
    """
    for i in range(x.shape[1]):
        value = x[row, i] / scale
        floats[0, i] = value
        floats[1, i] = abs(value) + _FP8_STEP
    for i in range(x.shape[1]):
        magnitude = np.int32(bits[0, i] & MAGNITUDE)
        sign = np.int32(bits[0, i] >> 24) & np.int32(0x80)
        even = np.int32(magnitude >> 20) & np.int32(1)
        normal = np.int32(np.int32(np.int32(magnitude + _HALF_BELOW) + even) >> 20) - _FP8_BIAS
        tiny = bits[1, i] - _FP8_STEP_BITS
        codes[row, i] = np.uint8(np.int32(normal if magnitude >= _FP8_NORMAL else tiny) | sign)


@kernel
def _from_fp8(codes: Any, row: Any, floats: Any, bits: Any) -> None:
    """Decode row `row` of e4m3 `codes` to floats[0], without an intermediate float32 below the normal
    range.
    """
    for i in range(codes.shape[1]):
        magnitude = np.int32(codes[row, i] & np.uint8(0x7F))
        bits[0, i] = np.int32(magnitude << 20) + np.int32(_FP8_BIAS << 20)
    for i in range(codes.shape[1]):
        value = floats[0, i]
        # An exponent of 0 stands for the same step as 1, and for no leading one.
        value = value if codes[row, i] & np.uint8(0x78) else np.float32(2.0) * value - np.float32(2.0**-6)
        floats[0, i] = -value if codes[row, i] & np.uint8(0x80) else value


@kernel
def _pack_pairs(pairs: Any, out: Any, row: Any) -> None:
    """Pack int4 codes, of a byte each, two in a byte of row `row` of `out`, the first in the lower half.

    `pairs` (1, bytes) uint16 has two codes in each entry.
    """
    for i in range(out.shape[1]):
        out[row, i] = np.uint8((pairs[0, i] & 0x0F) | ((pairs[0, i] >> 4) & 0xF0))


@kernel
def _unpack_pairs(packed: Any, row: Any, pairs: Any, small: Any) -> None:
    """Unpack the int4 codes in row `row` of `packed`; the inverse of `_pack_pairs`.

    `small` (1, block) int8 gets the codes. `pairs` is the same memory as uint16.
    """
    for i in range(packed.shape[1]):
        pairs[0, i] = np.uint16((packed[row, i] & 0x0F) | ((packed[row, i] & 0xF0) << 4))
    for i in range(small.shape[1]):
        small[0, i] = np.int8(np.int8(small[0, i] ^ np.int8(8)) - np.int8(8))


@kernel
def _encode_row(
    x: Any,
    row: Any,
    scale: Any,
    kind: Any,
    floats: Any,
    bits: Any,
    small: Any,
    pairs: Any,
    codes: Any,
    left: Any,
) -> None:
    """Write the codes of one block, row `row` of x, whose `scale` is positive and finite.

    Args:
        x: float32 (blocks, block); with `left`, the row keeps its rounding errors.
        kind: INT8, INT4 or FP8.
        floats, bits: one scratch memory (2, block), as float32 and int32.
        small, pairs: one scratch memory, int8 (1, block, even) and uint16.
        codes: uint8 (blocks, bytes), written in row `row`.
    """
    if kind == FP8:
        _to_fp8(x, row, scale, floats, bits, codes)
        if left:
            _from_fp8(codes, row, floats, bits)
            _subtract(x, row, scale, floats, 0)
        return
    _round(x, row, scale, floats, bits, small, 0)
    if left:
        _subtract(x, row, scale, small, 0)
    if kind == INT4:
        _pack_pairs(pairs, codes, row)
    else:
        for i in range(x.shape[1]):
            codes[row, i] = np.uint8(small[0, i])


@kernel
def _encode_rows(x: Any, kind: Any, largest: Any, scales: Any, codes: Any, left: Any) -> None:
    """Encode blocks of equal size.

    Args:
        x: float32 (blocks, block); with `left`, it keeps the rounding errors.
        kind: INT8, INT4 or FP8.
        largest: largest code.
        scales: float32 (blocks,), written.
        codes: uint8 (blocks, bytes), written.
    """
    x_bits, scale_bits = x.view(np.int32), scales.view(np.int32)
    bits = np.empty((2, x.shape[1]), np.int32)
    # Zeros, because an odd block has half a byte to spare.
    small = np.zeros((1, x.shape[1] + x.shape[1] % 2), np.int8)
    floats, pairs = bits.view(np.float32), small.view(np.uint16)
    for row in range(x.shape[0]):
        maximum = _largest_bits(x_bits, row)
        scale_bits[row] = maximum
        if 0 < maximum < INFINITY:
            _set_scale(scales, scale_bits, row, largest)
            _encode_row(x, row, scales[row], kind, floats, bits, small, pairs, codes, left)
            continue
        codes[row, :] = 0
        if maximum != 0:
            scales[row] = np.nan
            if left:
                x[row, :] = np.nan


@kernel
def _add_rows(scales: Any, codes: Any, kind: Any, weight: Any, out: Any) -> None:
    """out += weight · decoded, for blocks of equal size: scales (blocks,), codes (blocks, bytes), out
    (blocks, block).
    """
    bits = np.empty((1, out.shape[1]), np.int32)
    small = np.empty((1, out.shape[1] + out.shape[1] % 2), np.int8)
    floats, pairs, signed = bits.view(np.float32), small.view(np.uint16), codes.view(np.int8)
    for row in range(out.shape[0]):
        if kind == INT8:
            _add(out, row, scales[row], weight, signed, row)
        elif kind == INT4:
            _unpack_pairs(codes, row, pairs, small)
            _add(out, row, scales[row], weight, small, 0)
        else:
            _from_fp8(codes, row, floats, bits)
            _add(out, row, scales[row], weight, floats, 0)


@kernel
def _as_rows(x: Any, scales: Any, codes: Any, places: Any, count: Any, block: Any, kind: Any) -> Any:
    """Views of the next `count` blocks of `block` elements as rows of x, of scales and of the codes of this
    `kind`.

    `places` (3,) has the first element, scale and byte of these blocks, and is moved on to the next ones.
    """
    width = (block + 1) // 2 if kind == INT4 else block
    start, number, place = places
    places[0], places[1], places[2] = start + count * block, number + count, place + count * width
    return (
        x[start : places[0]].reshape((count, block)),
        scales[number : places[1]],
        codes[place : places[2]].reshape((count, width)),
    )


@prepared("float32[::1], int64[::1], int64, int64, float32, float32[::1], uint8[::1], boolean")
@kernel
def _encode_blocks(
    x: Any, sizes: Any, block: Any, kind: Any, largest: Any, scales: Any, codes: Any, left: Any
) -> None:
    """Encode float32 x, in parts of these `sizes`, into `scales` (blocks,) and uint8 `codes`; with `left`, x
    keeps the rounding errors.

    Blocks have `block` elements or fewer. `kind` is INT8, INT4 or FP8, and `largest` its largest code.
    """
    places = np.zeros(3, np.int64)
    for size in sizes:
        # The whole blocks of a part, then the last one if that is shorter.
        for count, length in ((size // block, block), (min(size % block, 1), size % block)):
            if count > 0:
                rows, row_scales, row_codes = _as_rows(x, scales, codes, places, count, length, kind)
                _encode_rows(rows, kind, largest, row_scales, row_codes, left)


@prepared("float32[::1], uint8[::1], int64[::1], int64, int64, float32, float32[::1]")
@kernel
def _add_blocks(scales: Any, codes: Any, sizes: Any, block: Any, kind: Any, weight: Any, out: Any) -> None:
    """float32: out += weight · decoded, in parts of these `sizes`. The other arguments are as in
    `_encode_blocks`.
    """
    places = np.zeros(3, np.int64)
    for size in sizes:
        for count, length in ((size // block, block), (min(size % block, 1), size % block)):
            if count > 0:
                rows, row_scales, row_codes = _as_rows(out, scales, codes, places, count, length, kind)
                _add_rows(row_scales, row_codes, kind, weight, rows)


@kernel
def _row(data: Any, start: Any, count: Any, code_bytes: Any) -> Any:
    """Views of the `count` scales and of the `code_bytes` bytes of codes in a shard's row, which begins at
    byte `start` of `data`.
    """
    codes = start + 4 * count
    return data[start:codes].view(np.float32), data[codes : codes + code_bytes]


@prepared("float32[::1], int64[::1], int64[:, ::1], int64, int64, float32, uint8[::1], int64")
@kernel
def _encode_shards(
    x: Any, sizes: Any, table: Any, block: Any, kind: Any, largest: Any, data: Any, width: Any
) -> None:
    """Encode each shard of float32 x into a row of `width` bytes of `data`; x keeps the rounding errors.

    `table` (shards, 4) has each shard's elements, parts, blocks and bytes of codes; `sizes` has the elements
    of all parts. The other arguments are as in `_encode_blocks`.
    """
    first, part = 0, 0
    for shard in range(table.shape[0]):
        numel, parts, count, code_bytes = table[shard]
        scales, codes = _row(data, shard * width, count, code_bytes)
        here = x[first : first + numel]
        _encode_blocks(here, sizes[part : part + parts], block, kind, largest, scales, codes, True)
        data[shard * width + 4 * count + code_bytes : (shard + 1) * width] = 0
        first, part = first + numel, part + parts


@prepared("uint8[::1], int64, int64[::1], int64[:, ::1], int64, int64, float32[::1]")
@kernel
def _add_shards(data: Any, width: Any, sizes: Any, table: Any, block: Any, kind: Any, out: Any) -> None:
    """float32: out += decoded, shard by shard. The arguments are as in `_encode_shards`."""
    first, part = 0, 0
    for shard in range(table.shape[0]):
        numel, parts, count, code_bytes = table[shard]
        scales, codes = _row(data, shard * width, count, code_bytes)
        here = out[first : first + numel]
        _add_blocks(scales, codes, sizes[part : part + parts], block, kind, np.float32(1.0), here)
        first, part = first + numel, part + parts


@prepared("uint8[::1], int64, int64[::1], int64, int64, int64, int64, float32, float32[::1]")
@kernel
def _sum_shard(
    data: Any,
    width: Any,
    sizes: Any,
    count: Any,
    code_bytes: Any,
    block: Any,
    kind: Any,
    weight: Any,
    out: Any,
) -> None:
    """float32: out += weight · decoded, over all rows of `width` bytes of `data`, one after the other. Each
    encodes the same shard, in parts of these `sizes`, with `count` blocks and `code_bytes` bytes of codes;
    `block` and `kind` are as in `_encode_blocks`.
    """
    for row in range(data.size // max(width, 1)):
        scales, codes = _row(data, row * width, count, code_bytes)
        _add_blocks(scales, codes, sizes, block, kind, weight, out)
