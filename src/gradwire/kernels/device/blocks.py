"""Blocks in a few bits, each with a scale: one pass with what is left, and sums over ranks as codes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradwire.kernels.device.bodies import blocks as bodies
from gradwire.kernels.device.launch import TILE, WARPS, is_taken, launch
from gradwire.kernels.device.tables import QUAD, coded_tiles
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.layouts import LARGEST, ScaledBlocks

_KINDS = {"int8": 0, "int4": 1, "fp8": 2}
_LONGEST = 8192
"""Elements of the longest block that a program keeps in registers."""


class _Cut(NamedTuple):
    """How blocks are cut into tiles, and what of it is constant in compiled code."""

    rows: Tensor
    constants: dict[str, int | bool]


def _cut(blocks: ScaledBlocks, *codes: Tensor) -> _Cut:
    """For codes that lie there: after scales, so that 4 is all that their address need be a multiple of."""
    width = max(2, 1 << (blocks.block - 1).bit_length())
    rows = max(1, TILE // width)
    bits = 4 if blocks.kind == "int4" else 8
    tiles = coded_tiles(blocks.sizes, blocks.block, bits, rows, None, codes[0].device)
    starts = [place for each in codes for place in (each.data_ptr(), *each.stride()[:-1])]
    aligned = tiles.aligned and tiles.bytes_aligned and not any(start % QUAD for start in starts)
    constants = {
        "KIND": _KINDS[blocks.kind], "ALIGNED": aligned, "ROWS": rows, "BLOCK": blocks.block,
        "WIDTH": width, "num_warps": max(WARPS, width // 512),
    }  # fmt: skip
    return _Cut(tiles.rows, constants)


def encode_blocks(
    x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool
) -> Declined | None:
    """9 bytes an element (int4 8.5) with what is left, 5 without."""
    if not is_taken(x, scales) or blocks.block > _LONGEST:
        return DECLINED
    cut = _cut(blocks, codes)
    launch(
        bodies.encode_blocks, len(cut.rows), x, cut.rows, scales, codes, LARGEST[blocks.kind],
        LEFT=left, **cut.constants,
    )  # fmt: skip
    return None


def add_blocks(
    scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float
) -> Declined | None:
    """9 bytes an element."""
    return _decode(scales, codes, blocks, out, weight, add=True)


def decode_blocks(
    scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float
) -> Declined | None:
    """5 bytes an element."""
    return _decode(scales, codes, blocks, out, weight, add=False)


def _decode(
    scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float, add: bool
) -> Declined | None:
    if not is_taken(out, scales) or blocks.block > _LONGEST:
        return DECLINED
    cut = _cut(blocks, codes)
    arguments = scales, codes, cut.rows, out, weight
    launch(bodies.decode_blocks, len(cut.rows), *arguments, ADD=add, **cut.constants)
    return None


def reduce_blocks(
    scales: Tensor,
    codes: Tensor,
    blocks: ScaledBlocks,
    weight: float,
    own: tuple[Tensor, Tensor],
    unsent: Tensor | None,
    share: float,
) -> Declined | None:
    """world + 9 bytes an element, and the sum never leaves the registers."""
    rest = own[0] if unsent is None else unsent
    if not is_taken(scales[0], own[0], rest) or blocks.block > _LONGEST:
        return DECLINED
    cut = _cut(blocks, codes, own[1])
    launch(
        bodies.reduce_blocks, len(cut.rows), scales, codes, scales.stride(0), codes.stride(0),
        len(scales), weight, cut.rows, *own, rest, share, LARGEST[blocks.kind],
        LEFT=unsent is not None, **cut.constants,
    )  # fmt: skip
    return None
