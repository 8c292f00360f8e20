"""Blocks of elements in 8 or 4 bits each, with a scale per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.compensation import compensate_marked
from gradwire.kernels.dispatch import contract
from gradwire.kernels.layouts import (
    LARGEST,
    CodedPieces,
    ScaledBlocks,
    ShardedBlocks,
    pack_codes,
    scale_type,
    unpack_codes,
)


def _fit(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool) -> None:
    blocks.check(x, scales, codes)


def _fit_sum(scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float) -> None:
    blocks.check(out, scales, codes)


def _fit_rows(x: Tensor, table: ShardedBlocks, rows: Tensor) -> None:
    table.check(x, rows)


def _fit_decoded(rows: Tensor, table: ShardedBlocks, out: Tensor) -> None:
    table.check(out, rows)


def _fit_landed(
    rows: Tensor, table: ShardedBlocks, places: Sequence[Tensor], factor: float, marks: Tensor
) -> None:
    numel, types = sum(each.numel() for each in places), {each.dtype for each in places}
    if numel != table.numel or len(types) > 1 or rows.shape != (len(table.shards), table.row_bytes):
        raise ValueError(f"{numel} elements of {types} and rows {tuple(rows.shape)} do not fit the shards")


def _fit_summed(rows: Tensor, table: ShardedBlocks, shard: int, out: Tensor, weight: float) -> None:
    _fit_shard(rows, table, shard, out)


def _fit_averaged(
    rows: Tensor, table: ShardedBlocks, shard: int, room: Tensor, unsent: Tensor | None
) -> None:
    _fit_shard(rows, table, shard, room)
    if (unsent is not None and unsent.shape != room.shape) or shard >= len(rows):
        raise ValueError(f"{len(rows)} rows, {room.numel()} elements and what is unsent do not fit {shard=}")


def _fit_shard(rows: Tensor, table: ShardedBlocks, shard: int, out: Tensor) -> None:
    expected = (table.row_bytes, table.shards[shard].numel, table.dtype)
    if (rows.shape[1], out.numel(), scale_type(out.dtype)) != expected or not rows.is_contiguous():
        raise ValueError(f"rows {tuple(rows.shape)} and {out.numel()} elements, but a shard needs {expected}")


def _fit_compensated(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float,
    coded: CodedPieces,
    room: Tensor,
    marks: Tensor,
) -> None:
    ends, slots = coded.pieces.ends, marks.numel() // 2
    is_short = working.numel() < ends[0] or grad.numel() < ends[1] or room.numel() < coded.ends[0]
    if is_short or slots <= coded.ends[1] or marks.numel() != 2 * slots + 1 or marks.dtype != torch.int32:
        raise ValueError(
            f"{working.numel()} elements, {room.numel()} bytes or {marks.numel()} marks do not fit"
        )
    if (committed is not None and committed.shape != working.shape) or room.dtype != torch.uint8:
        raise ValueError(f"the memory is {committed}, and the room of {room.dtype}")


@contract(_fit)
def encode_blocks(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool) -> None:
    """Encode x (n,) in blocks: write `scales` (blocks,) of `scale_type` and `codes` (bytes,) uint8.

    A code is x / scale, rounded to nearest, ties to even. int4 has two codes per byte. With `left`, x is
    overwritten with its rounding errors.

    >>> x, scales, codes = torch.tensor([254.0, -3.2]), torch.empty(1), torch.empty(2, dtype=torch.uint8)
    >>> encode_blocks(x, ScaledBlocks((2,), 256, "int8"), scales, codes, left=True)
    >>> scales, codes.view(torch.int8), x
    (tensor([2.]), tensor([127,  -2], dtype=torch.int8), tensor([0.0000, 0.8000]))
    """
    largest, wide = LARGEST[blocks.kind], scale_type(x.dtype)
    number = place = 0
    for part in torch.split(x, list(blocks.sizes)):
        count = part.numel()
        if count == 0:
            continue
        length = min(blocks.block, count)
        elements = rows(part.to(wide), length)
        scale = scales_of(elements, largest)
        code = codes_of(elements, scale, blocks.kind == "fp8")
        flat = code.reshape(-1)[:count].view(torch.uint8)
        packed = pack_rows(code, count) if blocks.kind == "int4" else flat
        scales[number : number + scale.numel()] = scale.view(-1)
        codes[place : place + packed.numel()] = packed
        if left:
            values = values_of(code, scale, blocks.kind == "fp8").reshape(-1)[:count]
            part.sub_(values.to(part.dtype))
        number, place = number + scale.numel(), place + packed.numel()


@contract(_fit_sum)
def add_blocks(scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float) -> None:
    """Decode and add: out (n,) += weight · scale · code, with `scales` (blocks,) and `codes` (bytes,) as
    `encode_blocks` writes them.

    >>> out, codes = torch.ones(2), torch.tensor([127, 2], dtype=torch.uint8)
    >>> add_blocks(torch.tensor([2.0]), codes, ScaledBlocks((2,), 256, "int8"), out, 0.5)
    >>> out
    tensor([128.,   3.])
    """
    kind, number, place = blocks.kind, 0, 0
    for part in torch.split(out, list(blocks.sizes)):
        count = part.numel()
        if count == 0:
            continue
        length = min(blocks.block, count)
        rows_here, last = -(-count // length), (count - 1) % length + 1
        size = (rows_here - 1) * -(-length // 2) + -(-last // 2) if kind == "int4" else count
        packed = codes[place : place + size]
        code = (
            unpack_rows(packed, count, length)
            if kind == "int4"
            else rows(packed, length).contiguous().view(torch.int8)
        )
        values = values_of(code, scales[number : number + rows_here, None], kind == "fp8")
        # Two roundings: torch's own `alpha` has one on some processors and two on others.
        part.add_((values.reshape(-1)[:count] * weight).to(part.dtype))
        number, place = number + rows_here, place + size


@contract(_fit_rows)
def encode_shards(x: Tensor, table: ShardedBlocks, rows: Tensor) -> None:
    """Encode each shard of x (numel,) into its row of `rows` (shards, row_bytes); x keeps the rounding
    errors.

    >>> table = ShardedBlocks((ScaledBlocks((1,), 256, "int8"), ScaledBlocks((1,), 256, "int8")))
    >>> x, rows = torch.tensor([127.0, -254.0]), torch.empty(2, table.row_bytes, dtype=torch.uint8)
    >>> encode_shards(x, table, rows)
    >>> rows[:, 4:].view(torch.int8), x
    (tensor([[ 127,    0,    0,    0],
            [-127,    0,    0,    0]], dtype=torch.int8), tensor([0., 0.]))
    """
    for row, (start, shard) in zip(rows, table.starts(), strict=True):
        scales, codes = table.split(row, shard)
        encode_blocks(x[start : start + shard.numel], shard, scales, codes, True)
        row[scales.nbytes + codes.nbytes :] = 0


@contract(_fit_decoded)
def decode_shards(rows: Tensor, table: ShardedBlocks, out: Tensor) -> None:
    """Decode one row per shard, as `encode_shards` wrote them, into `out` (numel,), which is overwritten.

    >>> table = ShardedBlocks((ScaledBlocks((1,), 256, "int8"), ScaledBlocks((1,), 256, "int8")))
    >>> rows, out = torch.empty(2, table.row_bytes, dtype=torch.uint8), torch.ones(2)
    >>> encode_shards(torch.tensor([127.0, -254.0]), table, rows)
    >>> decode_shards(rows, table, out)
    >>> out
    tensor([ 127., -254.])
    """
    out.zero_()
    for row, (start, shard) in zip(rows, table.starts(), strict=True):
        add_blocks(*table.split(row, shard), shard, out[start : start + shard.numel], 1.0)


@contract(_fit_landed)
def land_shards(
    rows: Tensor, table: ShardedBlocks, places: Sequence[Tensor], factor: float, marks: Tensor
) -> None:
    """Decode one row per shard, multiply by `factor`, and write the results to `places`, rounded to their
    type.

    `places` follow each other in the order of the elements, and are of one type. The last entry of `marks`,
    int32, becomes 1 if that type has a shorter range than float32 and a result is not finite in it.

    >>> table = ShardedBlocks((ScaledBlocks((1,), 256, "int8"), ScaledBlocks((1,), 256, "int8")))
    >>> rows, marks = torch.empty(2, table.row_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    >>> encode_shards(torch.tensor([127.0, -254.0]), table, rows)
    >>> places = [torch.empty(1, dtype=torch.float16) for _ in range(2)]
    >>> land_shards(rows, table, places, 0.5, marks)
    >>> torch.cat(places), marks
    (tensor([  63.5000, -127.0000], dtype=torch.float16), tensor([0], dtype=torch.int32))
    """
    whole = torch.empty(table.numel, dtype=table.dtype, device=rows.device)
    decode_shards(rows, table, whole)
    if factor != 1.0:
        whole *= factor
    for place, part in zip(places, whole.split_with_sizes([each.numel() for each in places]), strict=True):
        place.copy_(part)
        if torch.finfo(place.dtype).max < torch.finfo(whole.dtype).max:
            marks[-1:].bitwise_or_((~place.isfinite().all()).int())


@contract(_fit_summed)
def sum_shard(rows: Tensor, table: ShardedBlocks, shard: int, out: Tensor, weight: float) -> None:
    """out (elements of the shard,) += weight · the sum of the decoded `rows`.

    All `rows` encode the same shard, number `shard`; each comes from another rank. They are added in their
    order, so that all ranks round alike.

    >>> table = ShardedBlocks((ScaledBlocks((1,), 256, "int8"), ScaledBlocks((1,), 256, "int8")))
    >>> rows, out = torch.empty(2, table.row_bytes, dtype=torch.uint8), torch.zeros(1)
    >>> encode_shards(torch.tensor([127.0, -254.0]), table, rows)
    >>> sum_shard(rows, table, 0, out, 0.5)
    >>> out
    tensor([-63.5000])
    """
    blocks = table.shards[shard]
    for row in rows:
        add_blocks(*table.split(row, blocks), blocks, out, weight)


@contract(_fit_averaged)
def average_shard(
    rows: Tensor, table: ShardedBlocks, shard: int, room: Tensor, unsent: Tensor | None
) -> Tensor:
    """Average `rows`, which all encode shard number `shard`, and encode the mean.

    Args:
        rows: uint8 (ranks, row_bytes), one per rank; may be overwritten.
        table: the shards of the unit.
        shard: number of the shard in `table`.
        room: scratch memory (elements of the shard,).
        unsent: `None`, or (elements of the shard,): receives the rounding error of the mean, times the number
            of rows.

    Returns the encoded mean (row_bytes,) uint8, which may lie in `rows`.

    >>> table = ShardedBlocks((ScaledBlocks((1,), 256, "int8"), ScaledBlocks((1,), 256, "int8")))
    >>> rows, room = torch.empty(2, table.row_bytes, dtype=torch.uint8), torch.empty(1)
    >>> encode_shards(torch.tensor([127.0, -254.0]), table, rows)
    >>> row = average_shard(rows, table, 0, room, None)
    >>> row[:4].view(torch.float32), row[4:].view(torch.int8)
    (tensor([0.5000]), tensor([-127,    0,    0,    0], dtype=torch.int8))
    """
    return average_by(sum_shard, encode_blocks, rows, table, shard, room, unsent)


def average_by(
    sum_by: Callable[[Tensor, ShardedBlocks, int, Tensor, float], None],
    encode_by: Callable[[Tensor, ScaledBlocks, Tensor, Tensor, bool], None],
    rows: Tensor,
    table: ShardedBlocks,
    shard: int,
    room: Tensor,
    unsent: Tensor | None,
) -> Tensor:
    """Average and encode a shard as `average_shard` does, whose other arguments are the same. `sum_by` is
    `sum_shard` or a twin of it, `encode_by` is `encode_blocks` or a twin.

    A twin brings its own, since the contracts would check their arguments and look at each tensor again.
    """
    blocks, row = table.shards[shard], rows[shard]
    sum_by(rows, table, shard, room.zero_(), 1.0 / len(rows))
    scales, codes = table.split(row, blocks)
    encode_by(room, blocks, scales, codes, unsent is not None)
    row[scales.nbytes + codes.nbytes :] = 0
    if unsent is not None:
        unsent.add_(room, alpha=len(rows))
    return row


@contract(_fit_compensated)
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
    """Compensate as `compensate_marked` does, and in the same pass encode the sums as `encode_blocks` does.

    Args:
        working: the plane to write (numel,); keeps the rounding errors of the codes.
        committed, grad, coefficient, scale: as for `compensate_marked`.
        coded: pieces of the bucket, and the places of their scales and codes in `room`.
        room: uint8 (bytes,), written. Pieces whose gradient is all zeros get scales and codes of zero.
        marks: as for `compensate_marked`.

    >>> from gradwire.kernels.pieces import Pieces
    >>> coded = CodedPieces(Pieces([(0, 0, 1), (1, 1, 1)]), [0, 1], [(0, 0, 1, 0, 0, 4), (1, 1, 1, 1, 2, 12)],
    ...                     [(5, 3), (13, 3)], 256, "int8")
    >>> x, room, marks = torch.ones(2), torch.empty(16, dtype=torch.uint8), torch.zeros(5, dtype=torch.int32)
    >>> compensate_blocks(x, torch.ones(2), torch.tensor([126.0, 0.0]), 1.0, 1.0, coded, room, marks)
    >>> x, room.view(2, 8)[:, 4:].view(torch.int8), marks[2:]
    (tensor([0., 0.]), tensor([[127,   0,   0,   0],
            [  0,   0,   0,   0]], dtype=torch.int8), tensor([0, 1, 0], dtype=torch.int32))
    """
    compensate_marked(working, committed, grad, coefficient, scale, coded.pieces, coded.slots.tolist(), marks)
    numbers = room[: room.numel() // 4 * 4].view(torch.float32)
    for plane, _bucket, numel, _piece, first, byte in coded.runs.tolist():
        blocks = ScaledBlocks((numel,), coded.block, coded.kind)
        codes = room[byte : byte + blocks.code_bytes]
        encode_blocks(
            working[plane : plane + numel], blocks, numbers[first : first + blocks.count], codes, True
        )
    for byte, count in coded.zeros.tolist():
        room[byte : byte + count].zero_()


def rows(x: Tensor, block: int) -> Tensor:
    """Reshape a part (n,) to (blocks, block); the last block is padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def scales_of(blocks: Tensor, largest: float) -> Tensor:
    """Scales (blocks, 1) of blocks: the largest magnitude / `largest`; 0 for zeros, NaN with NaN or Inf.

    Normal scales are rounded towards zero, so that the largest code decodes to no more than the maximum and
    cannot overflow. Subnormal scales are rounded up, so that no code exceeds `largest`.
    """
    maxima = blocks.abs().amax(1, keepdim=True)
    # A tensor, because a division by a number may be a multiplication by its rounded reciprocal.
    scales = maxima / torch.full_like(maxima, largest)
    tiny = scales < torch.finfo(scales.dtype).smallest_normal
    back = scales * largest
    scales = torch.where(tiny & (back < maxima), scales.nextafter(maxima), scales)
    scales = torch.where(~tiny & (back > maxima), scales.nextafter(torch.zeros_like(maxima)), scales)
    return torch.where(maxima.isfinite(), scales, torch.nan)


def codes_of(blocks: Tensor, scales: Tensor, is_fp8: bool) -> Tensor:
    """Codes (blocks, block) int8 of `blocks` (blocks, block) with `scales` (blocks, 1), before packing:
    integers, or with `is_fp8` the bits of e4m3. 0 where the scale is 0 or NaN.
    """
    quotients = torch.where(scales > 0, blocks / scales, 0.0)
    if is_fp8:
        return quotients.to(torch.float8_e4m3fn).view(torch.int8)
    return quotients.round().to(torch.int8)


def values_of(codes: Tensor, scales: Tensor, is_fp8: bool) -> Tensor:
    """Decode `codes` (blocks, block) int8 with `scales` (blocks, 1), in the type of the scales. With `is_fp8`
    codes are the bits of e4m3.
    """
    numbers = codes.view(torch.float8_e4m3fn).float() if is_fp8 else codes
    return scales * numbers.to(scales.dtype)


def pack_rows(codes: Tensor, count: int) -> Tensor:
    """Pack the first `count` codes of 4 bits in (blocks, block) into bytes; every block begins a new byte."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    last = (count - 1) % codes.shape[1] + 1
    whole = (codes.shape[0] - 1) * even.shape[1] // 2
    return pack_codes(even.reshape(-1) & 15, 4)[: whole + -(-last // 2)]


def unpack_rows(packed: Tensor, count: int, block: int) -> Tensor:
    """Unpack `count` codes that `pack_rows` packed: (blocks, block) int8."""
    blocks, width = -(-count // block), block + block % 2
    filled = torch.nn.functional.pad(packed, (0, blocks * width // 2 - packed.numel()))
    codes = unpack_codes(filled, 4, blocks * width).view(blocks, width)[:, :block]
    return ((codes ^ 8) - 8).to(torch.int8)
