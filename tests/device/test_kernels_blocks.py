"""Blocks in few bits: kernels for devices against those of the CPU and the plain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from gradwire.kernels.blocks import compensate_blocks
from gradwire.kernels.layouts import LARGEST, BlockKind, CodedPieces, ScaledBlocks, ShardedBlocks
from gradwire.kernels.pieces import Pieces
from tests.device.bits import same
from tests.support.inputs import KINDS, generator, heavy_tail, normal
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device

Coder = Callable[..., object]
every_kind = looped("kind", LARGEST)
# Parts of sizes that no block divides, and blocks that fill a tile, or not, or are a power of two, or not.
LAYOUTS = (((0, 1, 2305, 0, 511), 256), ((513,), 64), ((2048,), 256), ((17, 3), 3), ((700, 2), 5000))


def encoded(
    x: Tensor, blocks: ScaledBlocks, encode: Coder, left: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, codes, and what is left."""
    rest, scales = x.clone(), torch.empty(blocks.count)
    codes = torch.full((blocks.code_bytes + 1,), 99, dtype=torch.uint8)
    assert encode(rest, blocks, scales, codes[:-1], left) is None
    assert codes[-1] == 99
    return scales, codes[:-1], rest


@looped(("draw", "kind"), product(KINDS, LARGEST), by=lambda row: row[1], few=1)
def test_scales_codes_and_the_rest_are_those_of_the_cpu(
    draw: Callable[[int], Tensor], kind: BlockKind
) -> None:
    for sizes, block in LAYOUTS:
        blocks = ScaledBlocks(sizes, block, kind)
        x = draw(blocks.numel)
        found = encoded(x, blocks, device.encode_blocks)
        for encode in (cpu.encode_blocks, plain.encode_blocks):
            assert all(map(same, found, encoded(x, blocks, encode)))


@every_kind
def test_blocks_begin_anywhere(kind: BlockKind) -> None:
    blocks = ScaledBlocks((3, 4096, 1), 256, kind)
    x = heavy_tail(4101)[1:]
    assert all(map(same, encoded(x, blocks, device.encode_blocks), encoded(x, blocks, cpu.encode_blocks)))
    scales, _codes, rest = encoded(x, blocks, device.encode_blocks, left=False)
    assert torch.equal(rest, x)
    assert same(scales, encoded(x, blocks, cpu.encode_blocks)[0])


@every_kind
def test_decoding_is_that_of_the_cpu(kind: BlockKind) -> None:
    for sizes, block in LAYOUTS:
        blocks = ScaledBlocks(sizes, block, kind)
        scales = normal(blocks.count).abs() * 1e-3
        scales[::5] = torch.nan
        # All bytes, though int8 never says -128, nor int4 -8, nor fp8 NaN.
        codes = torch.randint(0, 127, (blocks.code_bytes,), generator=generator(1), dtype=torch.uint8)
        for weight in (1.0, -1 / 3):
            outs = [normal(blocks.numel) for _ in range(3)]
            for module, out in zip((device, cpu, plain), outs, strict=True):
                module.add_blocks(scales, codes, blocks, out, weight)
            assert same(outs[0], outs[1])
            assert same(outs[0], outs[2])


def test_what_no_program_can_hold_is_declined() -> None:
    x, codes = torch.zeros(4), torch.zeros(4, dtype=torch.uint8)
    assert device.encode_blocks(x, ScaledBlocks((4,), 8193, "int8"), torch.zeros(1), codes, True) is not None
    wide = x.double()
    assert device.encode_blocks(wide, ScaledBlocks((4,), 8, "int8"), wide[:1], codes, True) is not None


# Shards of parts that no block divides, one of them empty, another with more parts than its neighbours.
SHARDS = (((600, 300), (2304,), (5, 0, 9)), ((257,), ()), ((64, 64), (128,), (127,), (129, 1)))


def tables(kind: BlockKind) -> list[ShardedBlocks]:
    """Of all `SHARDS`, in blocks that fill a tile, or not."""
    return [
        ShardedBlocks(tuple(ScaledBlocks(sizes, block, kind) for sizes in shards))
        for shards in SHARDS
        for block in (256, 33)
    ]


def rows_of(table: ShardedBlocks, x: Tensor) -> Tensor:
    """The CPU's rows of x, which keeps what is left."""
    rows = torch.empty(len(table.shards), table.row_bytes, dtype=torch.uint8)
    cpu.encode_shards(x, table, rows)
    return rows


@looped(("draw", "kind"), product(KINDS, LARGEST), by=lambda row: row[1], few=1)
def test_shards_are_coded_as_by_the_cpu(draw: Callable[[int], Tensor], kind: BlockKind) -> None:
    for table in tables(kind):
        x = draw(table.numel)
        found = []
        for module in (device, cpu, plain):
            rest = x.clone()
            # A byte more, which stays, and garbage where zeros belong.
            memory = torch.full((len(table.shards) * table.row_bytes + 1,), 99, dtype=torch.uint8)
            rows = memory[:-1].view(len(table.shards), table.row_bytes)
            module.encode_shards(rest, table, rows)
            assert memory[-1] == 99
            out = torch.full((table.numel,), 5.0)
            module.decode_shards(rows, table, out)
            found.append((rows, rest, out))
        for others in found[1:]:
            assert all(map(same, found[0], others))


@looped(("kind", "world"), product(LARGEST, (2, 3)), by=lambda row: row[0], few=1)
def test_the_mean_of_a_shard_is_coded_as_by_the_cpu(kind: BlockKind, world: int) -> None:
    shards = ((600, 300), (), (2304, 7), (5, 0, 9))
    table = ShardedBlocks(tuple(ScaledBlocks(sizes, 256, kind) for sizes in shards))
    for shard in range(world):
        numel, ranks = table.shards[shard].numel, range(world)
        # What each rank says of that shard, one of them of NaN.
        sent = [rows_of(table, heavy_tail(table.numel + rank)[rank:])[shard] for rank in ranks]
        bad = heavy_tail(table.numel)
        bad[: table.numel // 2] = torch.nan
        for rows in (torch.stack(sent), torch.stack([*sent[1:], rows_of(table, bad)[shard]])):
            for unsent in (None, normal(numel)):
                found = []
                for average in (device.average_shard, plain.average_shard):
                    mine = None if unsent is None else unsent.clone()
                    row = average(rows.clone(), table, shard, torch.empty(numel), mine)
                    found.append((row, torch.zeros(0) if mine is None else mine))
                assert all(map(same, *found)), (shard, unsent is None)


@looped(
    ("kind", "dtype"),
    product(LARGEST, (torch.float32, torch.float16, torch.bfloat16)),
    by=lambda row: row[0],
    few=1,
)
def test_means_land_in_many_places_as_by_the_cpu(kind: BlockKind, dtype: torch.dtype) -> None:
    table = ShardedBlocks(tuple(ScaledBlocks(sizes, 256, kind) for sizes in ((600, 300), (2304, 7), (5, 9))))
    rows = rows_of(table, normal(table.numel))
    for factor, huge in ((1.0, False), (3.0, False), (3e38, True)):
        found = []
        for land in (device.land_shards, plain.land_shards):
            buckets = [torch.full((size,), 5.0).to(dtype) for size in (1000, 2400)]
            # Runs end where parts of shards do.
            places = [buckets[0][3:903], buckets[1][:2304], buckets[0][905:905], buckets[0][910:931]]
            marks = torch.zeros(3, dtype=torch.int32)
            land(rows, table, places, factor, marks)
            found.append((*(bucket.float() for bucket in buckets), marks))
        assert all(map(same, *found)), factor
        assert found[0][2].tolist() == [0, 0, int(huge and dtype != torch.float32)]


def test_shards_of_wide_numbers_are_declined() -> None:
    table = ShardedBlocks((ScaledBlocks((4,), 8, "int8"),), torch.float64)
    x, rows = torch.zeros(4, dtype=torch.float64), torch.zeros(1, table.row_bytes, dtype=torch.uint8)
    assert device.encode_shards(x, table, rows) is NotImplemented
    assert device.decode_shards(rows, table, x) is NotImplemented
    assert device.average_shard(rows, table, 0, x, None) is NotImplemented


def coded_pieces(kind: BlockKind, shift: int, block: int) -> CodedPieces:
    """Four pieces of a bucket, two of them without a gradient below, cut where shards would end."""
    table = [(4 + shift, 0, 6000), (6100, 6000, 3), (6103 + shift, 6004, 4999), (12_000, 11_003, 1)]
    runs, zeros, byte = [], [], 0
    for number, (plane, bucket, numel) in enumerate(table):
        for start, stop in ((0, numel // 3), (numel // 3, numel)):
            if start < stop:
                blocks = ScaledBlocks((stop - start,), block, kind)
                place = (
                    plane + start,
                    bucket + start,
                    stop - start,
                    number,
                    byte // 4,
                    byte + 4 * blocks.count,
                )
                runs.append(place)
                end = place[-1] + blocks.code_bytes
                byte = -(-end // 4) * 4 + 40
                zeros.append((end, byte - end))
    return CodedPieces(Pieces(table), [3, 0, 1, 2], runs, zeros, block, kind)


@looped(
    ("kind", "dtype"),
    product(LARGEST, (torch.float32, torch.float16, torch.bfloat16)),
    by=lambda row: row[0],
    few=1,
)
def test_compensating_and_encoding_in_one_pass_is_both_of_the_cpu(
    kind: BlockKind, dtype: torch.dtype
) -> None:
    memories = normal(12_001), None, normal(12_001).bfloat16()
    for (shift, block), memory in zip(((0, 256), (1, 256), (0, 33)), memories, strict=True):
        coded = coded_pieces(kind, shift, block)
        grad = normal(11_004).to(dtype)
        grad[:3000] = 0.0  # half of a piece has a gradient
        grad[6000:6003], grad[6004:11_003] = -0.0, 0.0
        found = []
        for compensate in (device.compensate_blocks, plain.compensate_blocks):
            x, marks = torch.full((12_001,), 7.0), torch.zeros(9, dtype=torch.int32)
            room = torch.full((coded.ends[0] + 4,), 99, dtype=torch.uint8)
            compensate(x, memory, grad, 0.9, 0.5, coded, room, marks)
            found.append((x, room, marks[4:]))
        assert all(map(same, *found)), (shift, block)
        assert found[0][2].tolist() == [1, 1, 0, 0, 0]
        assert found[0][0][4 + shift - 1] == 7.0
        assert found[0][1][-1] == 99


@looped("bad", [torch.nan, torch.inf, 2.0**100])
def test_what_cannot_be_remembered_is_marked_while_it_is_encoded(bad: float) -> None:
    coded, grad = coded_pieces("int8", 0, 256), normal(11_004)
    grad[700] = bad
    for compensate in (device.compensate_blocks, plain.compensate_blocks):
        marks, room = torch.zeros(9, dtype=torch.int32), torch.empty(coded.ends[0], dtype=torch.uint8)
        compensate(torch.zeros(12_001), torch.zeros(12_001), grad, 1.0, 1.0, coded, room, marks)
        assert marks[4:].tolist() == [0, 0, 0, 0, 1]


def test_what_is_too_small_for_its_codes_is_refused() -> None:
    coded, x = coded_pieces("int8", 0, 256), torch.zeros(12_001)
    for room, marks in ((coded.ends[0] - 1, 9), (coded.ends[0], 7)):
        given = torch.empty(room, dtype=torch.uint8), torch.zeros(marks, dtype=torch.int32)
        with pytest.raises(ValueError, match="do not fit"):
            compensate_blocks(x, x, torch.zeros(11_004), 1.0, 1.0, coded, *given)
