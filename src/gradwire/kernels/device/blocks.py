"""Blocks in a few bits, each with a scale: encoded or decoded in one pass.

A program holds a few whole blocks as rows of a tile, all in registers, and reads them once for maximum,
rounding, subtraction and packing.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import (
    bfloat16_bits,
    bytes_at,
    bytes_from,
    load,
    magnitude,
    paired,
    parted,
    places_in,
)
from gradwire.kernels.device.compensation import BOUNDS, FLOATS, INFINITY, is_last_without_gradient
from gradwire.kernels.device.launch import TILE, WARPS, bound, is_taken, launch
from gradwire.kernels.device.tables import (
    QUAD,
    SCALE_BYTES,
    Tiles,
    bits_of,
    coded_tiles,
    landing_tiles,
    run_tiles,
    shard_tiles,
    sharded_tiles,
)
from gradwire.kernels.layouts import LARGEST, BlockKind, CodedPieces, ScaledBlocks, ShardedBlocks

_KINDS = {"int8": 0, "int4": 1, "fp8": 2}
_INT8, _INT4, _FP8 = map(tl.constexpr, _KINDS.values())
_LONGEST = 8192
"""Elements of the longest block that a program holds in registers; longer ones are left to plain torch."""


@lru_cache(maxsize=64)
def _rows_of(block: int) -> int:
    """Number of blocks of at most `block` elements in a tile."""
    return max(1, TILE // _width(block))


def _width(block: int) -> int:
    return max(2, 1 << (block - 1).bit_length())


@lru_cache(maxsize=256)
def _constants(kind: BlockKind, block: int, columns: int, aligned: bool) -> Mapping[str, int | bool]:
    """Constants of a kernel that is compiled for tables of so many columns."""
    width = _width(block)
    return {
        "KIND": _KINDS[kind], "ALIGNED": aligned, "COLUMNS": columns, "ROWS": _rows_of(block), "BLOCK": block,
        "WIDTH": width, "num_warps": max(WARPS, width // 512),
    }  # fmt: skip


def _compiled_for(kind: BlockKind, block: int, tiles: Tiles, codes: Tensor) -> Mapping[str, int | bool]:
    """Constants of a launch over `tiles`. Vector loads need addresses of `codes` that are multiples of 4.

    Larger multiples cannot be asked for, because codes follow the scales, of 4 bytes each.
    """
    aligned = tiles.aligned and tiles.bytes_aligned and not codes.data_ptr() % QUAD
    return _constants(kind, block, tiles.rows.shape[1], aligned)


def _tiles_of(blocks: ScaledBlocks, device: torch.device) -> Tiles:
    return coded_tiles(blocks.sizes, blocks.block, bits_of(blocks), _rows_of(blocks.block), None, device)


@bound
def encode_blocks(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool) -> None:
    """Twin of `gradwire.kernels.blocks.encode_blocks`. Encode in one launch. Memory traffic per element: 9
    bytes (int4 8.5) with `left`, 5 without.
    """
    if not is_taken(x, scales) or blocks.block > _LONGEST:
        return NotImplemented
    tiles = _tiles_of(blocks, codes.device)
    launch(
        _encode_blocks, tiles.rows.shape[0], x, tiles.rows, scales, codes, LARGEST[blocks.kind],
        LEFT=left, **_compiled_for(blocks.kind, blocks.block, tiles, codes),
    )  # fmt: skip
    return None


@bound
def add_blocks(scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float) -> None:
    """Twin of `gradwire.kernels.blocks.add_blocks`. Decode and add in one launch. Memory traffic: 9 bytes per
    element.
    """
    if not is_taken(out, scales) or blocks.block > _LONGEST:
        return NotImplemented
    tiles = _tiles_of(blocks, codes.device)
    launch(
        _decode_blocks, tiles.rows.shape[0], scales, codes, tiles.rows, out, weight,
        ADDS=True, **_compiled_for(blocks.kind, blocks.block, tiles, codes),
    )  # fmt: skip
    return None


@bound
def encode_shards(x: Tensor, table: ShardedBlocks, rows: Tensor) -> None:
    """Twin of `gradwire.kernels.blocks.encode_shards`. Encode all shards in one launch. Memory traffic: 9
    bytes per element (int4 8.5).
    """
    if not _takes(table, x):
        return NotImplemented
    first = table.shards[0]
    tiles = sharded_tiles(table, _rows_of(first.block), rows.device)
    launch(
        _encode_blocks, tiles.rows.shape[0], x, tiles.rows, rows.view(torch.float32), rows,
        LARGEST[first.kind], LEFT=True, **_compiled_for(first.kind, first.block, tiles, rows),
    )  # fmt: skip
    return None


@bound
def decode_shards(rows: Tensor, table: ShardedBlocks, out: Tensor) -> None:
    """Twin of `gradwire.kernels.blocks.decode_shards`. Decode all shards in one launch. Memory traffic: 5
    bytes per element.
    """
    if not _takes(table, out):
        return NotImplemented
    first = table.shards[0]
    tiles = sharded_tiles(table, _rows_of(first.block), rows.device)
    launch(
        _decode_blocks, tiles.rows.shape[0], rows.view(torch.float32), rows, tiles.rows, out, 1.0,
        ADDS=False, **_compiled_for(first.kind, first.block, tiles, rows),
    )  # fmt: skip
    return None


@bound
def land_shards(
    rows: Tensor, table: ShardedBlocks, places: Sequence[Tensor], factor: float, marks: Tensor
) -> None:
    """Twin of `gradwire.kernels.blocks.land_shards`. Decode all shards into `places` in one launch; a table
    on the device has the address of every tile.

    Memory traffic per element: 1 byte, and the bytes of the places' type.
    """
    if table.dtype is not torch.float32 or table.shards[0].block > _LONGEST or not places:
        return NotImplemented
    if not is_taken(*places, dtypes=FLOATS):
        return NotImplemented
    first, where = table.shards[0], tuple([(each.data_ptr(), each.numel(), each.itemsize) for each in places])
    tiles, targets, aligned = landing_tiles(table, _rows_of(first.block), where, rows.device)
    to = places[0] if places[0].dtype is torch.float32 else places[0].view(torch.int16)
    launch(
        _land_blocks, tiles.rows.shape[0], rows.view(torch.float32), rows, tiles.rows, targets, to, factor,
        marks, marks.numel() - 1,
        TYPE=FLOATS.index(places[0].dtype), LINED=aligned,
        **_compiled_for(first.kind, first.block, tiles, rows),
    )  # fmt: skip
    return None


def average_shard(
    rows: Tensor, table: ShardedBlocks, shard: int, room: Tensor, unsent: Tensor | None
) -> Tensor:
    """Twin of `gradwire.kernels.blocks.average_shard`. Average a shard in one launch. Returns the encoded
    mean, in new memory.

    None of `rows` is reused, because programs read and write in different orders. Memory traffic per element:
    1 byte for each row, 1 for the code, and 8 with `unsent`.
    """
    row = torch.empty_like(rows[0])
    return row if _average(rows, table, shard, room, unsent, row) is None else NotImplemented


@bound
def _average(
    rows: Tensor, table: ShardedBlocks, shard: int, room: Tensor, unsent: Tensor | None, row: Tensor
) -> None:
    """As `average_shard`, into `row`."""
    if not _takes(table, room) or (unsent is not None and not is_taken(unsent)):
        return NotImplemented
    blocks, count = table.shards[shard], rows.shape[0]
    tiles = shard_tiles(table, shard, _rows_of(blocks.block), rows.device)
    launch(
        _average_blocks, tiles.rows.shape[0], rows.view(torch.float32), rows,
        table.row_bytes // SCALE_BYTES, count, tiles.rows, row.view(torch.float32), row,
        room if unsent is None else unsent, 1.0 / count, LARGEST[blocks.kind], LEFT=unsent is not None,
        **_compiled_for(blocks.kind, blocks.block, tiles, rows),
    )  # fmt: skip
    return None


@bound
def compensate_blocks(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float,
    coded: CodedPieces,
    room: Tensor,
    marks: Tensor,
) -> None:
    """Twin of `gradwire.kernels.blocks.compensate_blocks`. Compensate and encode in one launch. Memory
    traffic: 13 bytes per element (int4 12.5).
    """
    old = working if committed is None else committed
    is_whole = working.dtype is torch.float32 and is_taken(working, old, grad, dtypes=FLOATS)
    if not is_whole or coded.block > _LONGEST or room.numel() % SCALE_BYTES:
        return NotImplemented
    tiles = run_tiles(coded, _rows_of(coded.block), working.device)
    bounds = (INFINITY, INFINITY) if committed is None else BOUNDS
    launch(
        _compensate_blocks, tiles.rows.shape[0], working, old, grad, tiles.rows, room.view(torch.float32),
        room, marks, marks.numel() // 2, coefficient, scale, *bounds, LARGEST[coded.kind],
        REMEMBERS=committed is not None, **_compiled_for(coded.kind, coded.block, tiles, room),
    )  # fmt: skip
    return None


def _takes(table: ShardedBlocks, x: Tensor) -> bool:
    return is_taken(x) and table.dtype is torch.float32 and table.shards[0].block <= _LONGEST


@triton.jit
def _scale_of(maximum, largest):
    """Scales of blocks: `maximum` / `largest`.

    A scale in the normal range is rounded towards zero, so that the largest code decodes to no more than the
    maximum and cannot overflow. A subnormal scale is rounded up, so that no code exceeds `largest`.

    Args:
        maximum: largest magnitudes of the blocks, as bits of float32.
        largest: largest code.

    Returns (scale as float32, mask of positive finite maxima). The scale of a block of zeros is 0, that of a
    block with NaN or Inf is NaN.
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
    """Round float32 to e4m3, ties to even; the code is in the lowest 8 bits of an int32.

    e4m3 has a sign, 4 bits of exponent with bias 7, and 3 of mantissa. Below 2^-6 it has steps of 2^-9. There
    2^14 is added first, because sums of that size are multiples of 2^-9 in float32.
    """
    bits = magnitude(value)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    tiny = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(bits >= 0x3C800000, normal, tiny) | sign


@triton.jit
def _from_fp8(code):
    """Decode e4m3: the code is in the lowest 8 bits of an int32; the result is float32."""
    value = (((code & 0x7F) << 20) + (960 << 20)).to(tl.float32, bitcast=True)
    # An exponent of 0 stands for the same step as 1, and for no leading one.
    value = tl.where((code & 0x78) != 0, value, 2.0 * value - 0.015625)
    # The sign as a bit: Triton's minus is 0 - x, which has no -0.
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _numbers_of(code, KIND: tl.constexpr):
    """Convert codes, in int32, to float32."""
    if KIND == _FP8:
        return _from_fp8(code)
    else:
        return code.to(tl.float32)


@triton.jit
def _codes_of(x, scale, positive, KIND: tl.constexpr):
    """Codes (blocks, elements) int32 of a tile; 0 in blocks whose scale is not positive and finite."""
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
    """Load the codes of a tile (ROWS, WIDTH) as int32; int8 and int4 with their sign."""
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
    """Encode the tile at `to` into scales and codes; with LEFT, the tile keeps its rounding errors."""
    x = load(to, mask)
    scale, positive = _scale_of(tl.max(magnitude(x), 1), largest)
    code = _codes_of(x, scale, positive, KIND)
    tl.store(scales + tl.arange(0, ROWS), scale, row_mask)
    _store_codes(codes, code, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    if LEFT:
        tl.store(to, x - scale[:, None] * _numbers_of(code, KIND), mask)


@triton.jit
def _store_zeros(codes, count):
    """Write `count` zeros as padding after a row's last codes."""
    place, done = tl.arange(0, 32), tl.zeros((), tl.int64)
    while done < count:
        tl.store(codes + done + place, tl.zeros((32,), tl.uint8), done + place < count)
        done += 32


@triton.jit
def _encode_blocks(
    x, rows, scales, codes, largest, LEFT: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Encode a tile of blocks of x; with LEFT, x keeps the rounding errors."""
    row = rows + tl.program_id(0).to(tl.int64) * COLUMNS
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    x, scales, codes = x + start + place, scales + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        _encode_tile(x, scales, codes, largest, numel, None, None, LEFT, ROWS, BLOCK, WIDTH, KIND)
    else:
        _encode_tile(x, scales, codes, largest, numel, mask, row_mask, LEFT, ROWS, BLOCK, WIDTH, KIND)
    if COLUMNS == 5:
        _store_zeros(codes + _code_bytes(numel, BLOCK, KIND), tl.load(row + 4))


@triton.jit
def _code_bytes(numel, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Bytes of the codes of `numel` elements; every block begins a new byte."""
    if KIND == _INT4:
        return numel // BLOCK * ((BLOCK + 1) // 2) + (numel % BLOCK + 1) // 2
    else:
        return numel


@triton.jit
def _decoded(
    scales, codes, numel, mask, row_mask,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load and decode a tile: scale · code (ROWS, WIDTH)."""
    code = _load_codes(codes, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    return load(scales + tl.arange(0, ROWS), row_mask)[:, None] * _numbers_of(code, KIND)


@triton.jit
def _decode_tile(
    scales, codes, out, weight, numel, mask, row_mask, ADDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """out = weight · (scale · code) on a tile; with ADDS, it is added to `out`."""
    value = weight * _decoded(scales, codes, numel, mask, row_mask, ROWS, BLOCK, WIDTH, KIND)
    if ADDS:
        value = load(out, mask) + value
    else:
        value = tl.where(value == 0, 0.0, value)  # a sum with 0 has no -0
    tl.store(out, value, mask)


@triton.jit
def _decode_blocks(
    scales, codes, rows, out, weight, ADDS: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = weight · (scale · code) on a tile of blocks; with ADDS, it is added to `out`."""
    row = rows + tl.program_id(0).to(tl.int64) * COLUMNS
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    out, scales, codes = out + start + place, scales + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        _decode_tile(scales, codes, out, weight, numel, None, None, ADDS, ROWS, BLOCK, WIDTH, KIND)
    else:
        _decode_tile(scales, codes, out, weight, numel, mask, row_mask, ADDS, ROWS, BLOCK, WIDTH, KIND)


@triton.jit
def _land_tile(
    scales, codes, to, factor, numel, mask, row_mask, TYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write factor · (scale · code) to a tile at `to`, in another type.

    Returns 1 if TYPE has a shorter range than float32 and a result is not finite in it, else 0.
    """
    value = _decoded(scales, codes, numel, mask, row_mask, ROWS, BLOCK, WIDTH, KIND)
    value = tl.where(value == 0, 0.0, value) * factor  # a sum with 0 has no -0
    if TYPE == 0:
        tl.store(to, value, mask)
        return tl.zeros((), tl.int32)
    else:
        if TYPE == 1:
            short = bfloat16_bits(value)
            beyond, short = (short & 0x7F80) == 0x7F80, short.to(tl.int16)
        else:
            short = value.to(tl.float16).to(tl.int16, bitcast=True)
            beyond = (short & 0x7C00) == 0x7C00
        tl.store(to, short, mask)
        return tl.max(beyond.to(tl.int32))


@triton.jit(do_not_specialize=["last"])
def _land_blocks(
    scales, codes, rows, targets, to, factor, marks, last, TYPE: tl.constexpr, LINED: tl.constexpr,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write factor · (scale · code) of a tile to its place: element targets[tile], counted from `to`.

    Sets marks[last] if a result is not finite in the type.
    """
    row = rows + tl.program_id(0).to(tl.int64) * COLUMNS
    number, byte, numel = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    target = tl.load(targets + tl.program_id(0))
    if LINED:
        target = tl.multiple_of(target, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    scales, codes, to = scales + number, bytes_from(codes, byte, ALIGNED), to + target + place
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        beyond = _land_tile(scales, codes, to, factor, numel, None, None, TYPE, ROWS, BLOCK, WIDTH, KIND)
    else:
        beyond = _land_tile(
            scales, codes, to, factor, numel, mask, row_mask, TYPE, ROWS, BLOCK, WIDTH, KIND
        )  # fmt: skip
    if beyond > 0:
        tl.store(marks + last, 1)


@triton.jit
def _average_tile(
    scales, codes, words, count, new_scales, new_codes, unsent, weight, largest, numel, mask, row_mask,
    LEFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Average a tile over `count` rows, and encode the mean; with LEFT, add its rounding error, times
    `count`, to `unsent`.

    Each row lies `words` float32 numbers after the one before.
    """
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    done = tl.zeros((), tl.int64)
    while done < count:  # one after the other, so that all ranks round alike
        at = done * words
        value = _decoded(scales + at, codes + at * 4, numel, mask, row_mask, ROWS, BLOCK, WIDTH, KIND)
        mean += weight * value
        done += 1
    scale, positive = _scale_of(tl.max(magnitude(mean), 1), largest)
    code = _codes_of(mean, scale, positive, KIND)
    tl.store(new_scales + tl.arange(0, ROWS), scale, row_mask)
    _store_codes(new_codes, code, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    if LEFT:
        left = mean - scale[:, None] * _numbers_of(code, KIND)
        # In float64 the product is exact, so that the sum rounds once, as torch's does.
        total = load(unsent, mask).to(tl.float64) + left.to(tl.float64) * count.to(tl.float64)
        tl.store(unsent, total.to(tl.float32), mask)


@triton.jit(do_not_specialize=["words", "count"])
def _average_blocks(
    scales, codes, words, count, rows, new_scales, new_codes, unsent, weight, largest,
    LEFT: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Encode the mean of `count` rows, for a tile of blocks; with LEFT, add its rounding error, times
    `count`, to `unsent`.
    """
    row = rows + tl.program_id(0).to(tl.int64) * COLUMNS
    start, number, byte, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    unsent, scales, new_scales = unsent + start + place, scales + number, new_scales + number
    codes, new_codes = bytes_from(codes, byte, ALIGNED), bytes_from(new_codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        _average_tile(
            scales, codes, words, count, new_scales, new_codes, unsent, weight, largest, numel, None, None,
            LEFT, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
    else:
        _average_tile(
            scales, codes, words, count, new_scales, new_codes, unsent, weight, largest, numel, mask,
            row_mask, LEFT, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
    _store_zeros(new_codes + _code_bytes(numel, BLOCK, KIND), tl.load(row + 4))


@triton.jit
def _compensate_tile(
    to, old, new, scales, codes, coefficient, factor, gradient_bound, sum_bound, largest, numel, mask,
    row_mask, REMEMBERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Compensate and encode a tile, and write its rounding errors to `to`.

    Returns (largest magnitude of its gradient as bits, 1 if a magnitude reaches its bound, else 0).
    """
    grad = load(new, mask)
    added = grad * factor
    if REMEMBERS:
        total = load(old, mask) * coefficient + added
    else:
        total = added
    scale, positive = _scale_of(tl.max(magnitude(total), 1), largest)
    code = _codes_of(total, scale, positive, KIND)
    tl.store(scales + tl.arange(0, ROWS), scale, row_mask)
    _store_codes(codes, code, mask, numel, ROWS, BLOCK, WIDTH, KIND)
    tl.store(to, total - scale[:, None] * _numbers_of(code, KIND), mask)
    beyond = (magnitude(added) >= gradient_bound) | (magnitude(total) >= sum_bound)
    return tl.max(magnitude(grad)), tl.max(beyond.to(tl.int32))


@triton.jit
def _clear_tiles(
    plane, scales, codes, rows, first, count,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write zeros to `count` tiles of the plane, from number `first` on, and to their scales and codes."""
    number, stop = first, first + count
    while number < stop:
        row = rows + number * 9
        numel = tl.load(row + 3)
        place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
        tl.store(plane + tl.load(row) + place, tl.zeros((ROWS, WIDTH), tl.float32), mask)
        tl.store(scales + tl.load(row + 1) + tl.arange(0, ROWS), tl.zeros((ROWS,), tl.float32), row_mask)
        zeros = tl.zeros((ROWS, WIDTH), tl.int32)
        _store_codes(codes + tl.load(row + 2), zeros, mask, numel, ROWS, BLOCK, WIDTH, KIND)
        number += 1


@triton.jit(do_not_specialize=["slots", "gradient_bound", "sum_bound"])
def _compensate_blocks(
    working, committed, grad, rows, scales, codes, marks, slots, coefficient, factor, gradient_bound,
    sum_bound, largest, REMEMBERS: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """working = rounding errors of coefficient · committed + factor · grad, which is encoded.

    Only the last tile of a parameter can tell that it has no gradient at all: the program that counts it
    clears all of the parameter's tiles.
    """
    row = rows + tl.program_id(0).to(tl.int64) * COLUMNS
    start, number, byte, numel, bucket = (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 5)
    )  # fmt: skip
    if ALIGNED:
        start, bucket = tl.multiple_of(start, 4), tl.multiple_of(bucket, 4)
    place, mask, row_mask = places_in(numel, ROWS, BLOCK, WIDTH)
    to, old, new = working + start + place, committed + start + place, grad + bucket + place
    own_scales, own_codes = scales + number, bytes_from(codes, byte, ALIGNED)
    if (WIDTH == BLOCK) & (numel == ROWS * BLOCK):
        top, beyond = _compensate_tile(
            to, old, new, own_scales, own_codes, coefficient, factor, gradient_bound, sum_bound, largest,
            numel, None, None, REMEMBERS, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
    else:
        top, beyond = _compensate_tile(
            to, old, new, own_scales, own_codes, coefficient, factor, gradient_bound, sum_bound, largest,
            numel, mask, row_mask, REMEMBERS, ROWS, BLOCK, WIDTH, KIND,
        )  # fmt: skip
    _store_zeros(own_codes, tl.load(row + 4))
    if beyond > 0:
        tl.store(marks + 2 * slots, 1)
    if (top == 0) & (numel > 0):
        count = tl.load(row + 8)
        if is_last_without_gradient(marks, slots, tl.load(row + 6), count):
            _clear_tiles(working, scales, codes, rows, tl.load(row + 7), count, ROWS, BLOCK, WIDTH, KIND)
