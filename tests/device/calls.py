"""One call of every function of `kernels/device`, in a form that recipes use; on the CPU, for compiling."""

from __future__ import annotations

import torch

from gradwire.codec.indices import elias_fano_planes
from gradwire.codec.sparse import sparse_layout
from gradwire.kernels.layouts import BlockKind, Blocks, CodedPieces, Grid, ScaledBlocks, ShardedBlocks
from gradwire.kernels.pieces import Pieces
from gradwire.kernels.ulps import TILE, Halves
from tests.support.twins import Twins

N = 1 << 14
device = Twins("device")


def compensate() -> None:
    x = torch.zeros(N)
    device.compensate(x, torch.zeros(N), torch.zeros(N), 1.0)


def compensate_narrow_without_a_memory() -> None:
    device.compensate(torch.zeros(N), None, torch.zeros(N, dtype=torch.bfloat16), 1.0)


def compensate_marked() -> None:
    marks = torch.zeros(3, dtype=torch.int32)
    device.compensate_marked(
        torch.zeros(N), torch.zeros(N), torch.zeros(N), 1.0, 1.0, Pieces([(0, 0, N)]), (0,), marks
    )


def compensate_unaligned() -> None:
    device.compensate(torch.zeros(N), torch.zeros(N), torch.zeros(N), 1.0, 1.0, Pieces([(1, 3, 5)]))


def compensate_momentum() -> None:
    planes = torch.zeros(4, N)
    device.compensate_momentum((planes[0], planes[1]), (planes[2], planes[3]), torch.zeros(N), 0.9)


def compensate_momentum_ahead() -> None:
    planes = torch.zeros(4, N)
    device.compensate_momentum(
        (planes[0], planes[1]), (planes[2], planes[3]), torch.zeros(N), 0.9, nesterov=True
    )


def poison() -> None:
    device.poison([torch.zeros(N)], torch.zeros(1))


def mark_not_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        device.mark_not_finite(torch.zeros(N, dtype=dtype), torch.zeros(1, dtype=torch.int32))


def joined() -> None:
    mark = torch.zeros(1, dtype=torch.int32)
    regions = [torch.zeros(N, dtype=each) for each in (torch.float32, torch.float16, torch.bfloat16)]
    device.join(regions, torch.zeros(3 * N + 1), 0.5, mark)
    device.split(torch.zeros(3 * N + 1), regions, mark)


def zero_idle() -> None:
    device.zero_idle(torch.zeros(N), Pieces([(0, 0, N)]), torch.zeros(1, dtype=torch.bool))


def coded(kind: BlockKind) -> None:
    """As in a payload: codes after scales, of which there need not be a multiple of 4."""
    blocks = ScaledBlocks((N + 256,), 256, kind)
    payload = torch.zeros(4 * blocks.count + blocks.code_bytes, dtype=torch.uint8)
    scales, codes = payload[: 4 * blocks.count].view(torch.float32), payload[4 * blocks.count :]
    device.encode_blocks(torch.zeros(N + 256), blocks, scales, codes, True)
    device.add_blocks(scales, codes, blocks, torch.zeros(N + 256), 1.0)


def sharded(kind: BlockKind) -> None:
    table = ShardedBlocks((ScaledBlocks((N + 256,), 256, kind), ScaledBlocks((N,), 256, kind)))
    rows = torch.zeros(2, table.row_bytes, dtype=torch.uint8)
    device.encode_shards(torch.zeros(table.numel), table, rows)
    device.average_shard(rows, table, 1, torch.zeros(N), torch.zeros(N))
    device.decode_shards(rows, table, torch.zeros(table.numel))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        places = [torch.zeros(table.numel, dtype=dtype)]
        device.land_shards(rows, table, places, 1.0, torch.zeros(1, dtype=torch.int32))


def compensated(kind: BlockKind, dtype: torch.dtype) -> None:
    """A bucket whose only parameter is a shard."""
    blocks = ScaledBlocks((N,), 256, kind)
    runs = [(0, 0, N, 0, 0, 4 * blocks.count)]
    place = CodedPieces(Pieces([(0, 0, N)]), [0], runs, [], 256, kind)
    room, marks = torch.zeros(4 * blocks.count + N, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    grad = torch.zeros(N, dtype=dtype)
    device.compensate_blocks(torch.zeros(N), torch.zeros(N), grad, 1.0, 1.0, place, room, marks)


def blocks_int8() -> None:
    coded("int8")
    sharded("int8")
    compensated("int8", torch.float32)


def blocks_int4() -> None:
    coded("int4")
    sharded("int4")
    compensated("int4", torch.bfloat16)


def blocks_fp8() -> None:
    coded("fp8")
    sharded("fp8")
    compensated("fp8", torch.float16)


def chunks() -> None:
    device.chunk_topk_indices(torch.zeros(N), 101, 1)


def topk() -> None:
    device.topk_indices(torch.zeros(N), 16)


def signs() -> None:
    packed = torch.zeros(N // 8, dtype=torch.uint8)
    for levels in (1, 2):
        device.pack_signs(torch.zeros(N), Blocks((N,)), torch.zeros(1, levels), packed, leave=True)
        device.add_signs(torch.zeros(1, levels), packed, Blocks((N,)), torch.zeros(N))


def ulps() -> None:
    for halves in (Halves(7, 121), Halves(10, 9)):
        old, table = torch.zeros(N, dtype=torch.int16), torch.zeros(16, dtype=torch.uint8)
        device.tally_changes(old, old, halves.mantissa)
        device.pack_widths(old, old, halves, table)
        device.add_widths(torch.zeros(2 * N // TILE, dtype=torch.int32), old, halves, table)


def places() -> None:
    for count, dtype in ((16, torch.float32), (160, torch.bfloat16), (N // 2, torch.float16)):
        shape = sparse_layout(count, N, dtype).shape
        device.take_chosen(torch.zeros(N), torch.arange(count), shape)
        payloads, mark = torch.zeros(2, shape.bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        device.average_chosen(payloads, shape, torch.zeros(N), 0.5, mark)
    planes = elias_fano_planes(160, N)
    device.unpack_elias_fano(device.pack_elias_fano(torch.arange(160), planes), planes)
    device.put(torch.zeros(N), torch.arange(16), device.take(torch.zeros(N), torch.arange(16)))
    device.scatter(torch.zeros(N), torch.arange(16), torch.zeros(16))


def low_rank() -> None:
    """Two matrices, of rank 2."""
    places = torch.tensor([[0, 64, 64, 0, 0], [4096, 32, 128, 128, 128]])
    x, left, right = torch.zeros(8192), torch.zeros(192), torch.zeros(384)
    device.left_products(x, places, 2, left, right, subtract=True)
    device.right_products(x, places, 2, left, right)
    device.outer_products(x, places, 2, left, right)
    device.orthonormalise(left, places[:, [3, 1]], 2)
    device.orthonormalise(right, places[:, [4, 2]], 2, torch.zeros(384))


def quantized(grid: Grid) -> None:
    steps, codes = torch.zeros(grid.buckets), torch.zeros(grid.code_bytes, dtype=torch.uint8)
    x = torch.zeros(sum(grid.sizes))
    device.quantize(x, grid, 1, steps, codes, subtract=True)
    device.add_quantized(steps, codes, grid, x, 1.0)


def qsgd() -> None:
    for bits in (8, 4):
        quantized(Grid((N,), 512, bits))


def terngrad() -> None:
    quantized(Grid((N,), None, 2, "max"))


def terngrad_clipped() -> None:
    quantized(Grid((N,), None, 2, "max", 2.5))


CALLS = (
    compensate,
    compensate_narrow_without_a_memory,
    compensate_marked,
    compensate_unaligned,
    compensate_momentum,
    compensate_momentum_ahead,
    poison,
    mark_not_finite,
    joined,
    zero_idle,
    chunks,
    signs,
    ulps,
    topk,
    places,
    low_rank,
    blocks_int8,
    blocks_int4,
    blocks_fp8,
    qsgd,
    terngrad,
    terngrad_clipped,
)
