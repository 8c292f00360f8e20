"""Blocks of elements in 8 or 4 bits each, with a scale of their own: int8, int4, or fp8 in e4m3.

Linear quantization with the largest magnitude as the end of the range (Dettmers 2016, "8-bit approximations
for parallelism in deep learning", section 3.1), block by block (Dettmers et al. 2022, "8-bit optimizers via
block-wise quantization", section 2.1). e4m3 is that of Micikevicius et al. 2022, "FP8 formats for deep
learning".

Differences from the papers: blocks never lie in two parameters; integers are -127 … 127 or -7 … 7, so that a
number and its negative are equally far; fp8 has a scale per block, too. A power of two as scale of fp8 was
tried, and leaves 2 % (normal numbers) to 12 % (heavy tails) more error than mapping the maximum to 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from gradwire.codec.scales import ScaledPayload
from gradwire.kernels.blocks import (
    add_blocks,
    average_shard,
    decode_shards,
    encode_blocks,
    encode_shards,
)
from gradwire.kernels.layouts import BlockKind, ScaledBlocks, ShardedBlocks, scale_type
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class BlockCodec:
    """Codec with a scale s = max / largest code for each block of at most `block` elements; codes are x/s to
    nearest.

    The payload is the scales (float32; float64 for float64), then the codes, padded to whole scales.

    Error per element, but for roundings of a relative 2^-16: at most min(|x|, s/2) for int8 and int4, at most
    max(|x|/16, s/1024) for fp8; for maxima below the normal range half a subnormal step more. So with n the
    elements of a block, ‖x − C(x)‖² ≤ γ‖x‖² with γ = (n − 1) / (4·127² + n − 1) for int8, 7² for int4 and
    1/256 for fp8: 0.004, 0.39 (n = 128) and 0.004 (`docs/engineering/laws.md`). The largest code decodes to
    no more than the block's maximum. A block of zeros decodes to zeros, one with NaN or Inf to NaN
    throughout.
    """

    kind: BlockKind
    block: int
    laws = Laws(contractive=True, total=True, stays_on_device=True, fixed_rounds=True)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        _blocks, layout = ctx.once(self._layout, numel, dtype)
        return layout.bytes, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self._encode(x, ctx, left=False)

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Encode, and leave the rounding errors in x. They are exact where a code is not 0, except at a
        block's maximum.
        """
        return self._encode(x, ctx, left=True)

    def _encode(self, x: Tensor, ctx: ExchangeContext, left: bool) -> Tensor:
        blocks, layout = ctx.once(self._layout, x.numel(), x.dtype)
        payload = layout.empty(x.device)
        ctx.kernels[encode_blocks](x, blocks, *layout.split(payload), left)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        blocks, layout = ctx.once(self._layout, out.numel(), out.dtype)
        ctx.kernels[add_blocks](*layout.split(payload), blocks, out, weight)

    def in_rows(self, shards: Sequence[tuple[int, ...]], dtype: torch.dtype) -> BlocksInRows:
        """Coder for shards whose parts have these sizes, all in one call."""
        blocks = tuple(ScaledBlocks(sizes, self.block, self.kind) for sizes in shards)
        return BlocksInRows(ShardedBlocks(blocks, scale_type(dtype)))

    def _layout(
        self, ctx: ExchangeContext, numel: int, dtype: torch.dtype
    ) -> tuple[ScaledBlocks, ScaledPayload]:
        blocks = ScaledBlocks(ctx.sizes(numel), self.block, self.kind)
        return blocks, ScaledPayload(blocks.count, blocks.code_bytes, scale_type(dtype))


@dataclass(frozen=True)
class BlocksInRows:
    """`RowCoder` that encodes or decodes all shards of a segment in one call."""

    table: ShardedBlocks

    def encode(self, x: Tensor, rows: Tensor, ctx: ExchangeContext) -> None:
        ctx.kernels[encode_shards](x, self.table, rows)

    def average(
        self, rank: int, rows: Tensor, room: Tensor, unsent: Tensor | None, ctx: ExchangeContext
    ) -> Tensor:
        return ctx.kernels[average_shard](rows, self.table, rank, room, unsent)

    def decode(self, rows: Tensor, out: Tensor, ctx: ExchangeContext) -> None:
        ctx.kernels[decode_shards](rows, self.table, out)


def blocks(kind: BlockKind, block: int = 256) -> BlockCodec:
    """Send every element in 8 bits (int8, fp8) or 4 (int4), and a scale per `block` elements.

    Raises `ValueError` for an unknown `kind` or a `block` below 1.

    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> x = torch.tensor([254.0, -3.2, 0.9])
    >>> codec, out = blocks("int8"), torch.zeros(3)
    >>> payload = codec.take(x, ctx)
    >>> codec.add_decoded(payload, out, 1.0, ctx)
    >>> payload.numel(), out, x
    (8, tensor([254.,  -4.,   0.]), tensor([0.0000, 0.8000, 0.9000]))
    """
    if kind not in get_args(BlockKind):
        raise ValueError(f"kind={kind!r} is none of {', '.join(get_args(BlockKind))}")
    if block < 1:
        raise ValueError(f"block={block} must be at least 1 element; 64 to 1024 are usual")
    return BlockCodec(kind, block)
