"""Layouts of a unit's codes: blocks of bits, blocks with a scale, and buckets of levels.

The parts of a unit are coded side by side. No block or bucket reaches from one part into the next.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.pieces import Pieces


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` elements, into which parts of `sizes` elements are cut; the last block of a part may
    be shorter.

    Without `size`, every part is one block. Bits are packed part by part, and each part begins a new byte.

    >>> blocks = Blocks((20, 0, 3), 8)
    >>> blocks.count, blocks.bytes
    (4, 4)
    >>> Blocks((20, 0, 3)).count
    2
    """

    sizes: tuple[int, ...]
    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and (self.size < 8 or self.size % 8):
            raise ValueError(f"block={self.size} is not a multiple of 8 elements, whose bits are whole bytes")

    @cached_property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(self.sizes)

    @cached_property
    def step(self) -> int:
        """Elements per block. Without `size`, the elements of all parts, so that no part is cut."""
        return self.size or max(self.numel, 1)

    @cached_property
    def count(self) -> int:
        """Number of blocks in all parts; an empty part has none."""
        return sum(-(-size // self.step) for size in self.sizes)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the packed bits, one bit per element."""
        return sum(-(-size // 8) for size in self.sizes)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First element of each part, and the end of the last part: (parts + 1,)."""
        return np.fromiter(accumulate(self.sizes, initial=0), np.int64, len(self.sizes) + 1)

    def check(self, x: Tensor, levels: Tensor, packed: Tensor) -> None:
        """Raise `ValueError` unless x (numel,), levels (count, 1 or 2) and contiguous uint8 `packed` (bytes,)
        fit.
        """
        if x.shape != (self.numel,) or packed.shape != (self.bytes,) or packed.dtype != torch.uint8:
            raise ValueError(f"{self} do not fit {tuple(x.shape)} elements and {tuple(packed.shape)} bytes")
        if levels.shape not in ((self.count, 1), (self.count, 2)) or not packed.is_contiguous():
            raise ValueError(f"{self} need levels (blocks, 1 or 2) and bytes in a row")


BlockKind = Literal["int8", "int4", "fp8"]

LARGEST: dict[str, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""Largest code of each kind. A block's largest magnitude is mapped to it."""


def scale_type(dtype: torch.dtype) -> torch.dtype:
    """Type of the scales of a tensor of `dtype`, in which codes are computed: float64 for float64,
    else float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class ScaledBlocks:
    """Blocks of `block` elements or less, each with a scale, into which parts of `sizes` elements are cut.

    No block lies in two parts. `kind` is the type of the codes. int4 codes begin a new byte with every block.

    >>> blocks = ScaledBlocks((600, 1), 256, "int4")
    >>> blocks.count, blocks.code_bytes, ScaledBlocks((600, 1), 256, "int8").code_bytes
    (4, 301, 601)
    """

    sizes: tuple[int, ...]
    block: int
    kind: BlockKind

    @cached_property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(self.sizes)

    @cached_property
    def count(self) -> int:
        """Number of blocks in all parts, and of their scales; an empty part has none."""
        return sum(-(-size // self.block) for size in self.sizes)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of all codes, without the scales."""
        if self.kind != "int4":
            return self.numel
        whole = -(-self.block // 2)
        return sum(size // self.block * whole + -(-(size % self.block) // 2) for size in self.sizes)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """Sizes of the parts as an array (parts,)."""
        return np.array(self.sizes, np.int64)

    def check(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Raise `ValueError` unless x (numel,), scales (count,) and contiguous uint8 codes (code_bytes,) have
        these sizes.
        """
        expected = (self.numel, self.count, self.code_bytes)
        found = (x.numel(), scales.numel(), codes.numel())
        if found != expected or codes.dtype != torch.uint8 or not codes.is_contiguous():
            where = f"for {self.kind} in {self.block}s"
            raise ValueError(f"elements, blocks and bytes are {found}, but {expected} {where}")


@dataclass(frozen=True)
class ShardedBlocks:
    """Blocks of several shards of a unit, in order. Each shard is encoded into a row of bytes.

    A row holds the shard's scales, its codes, and zeros up to the length of the longest row. `dtype` is the
    type of the scales.

    >>> table = ShardedBlocks((ScaledBlocks((300,), 256, "int8"), ScaledBlocks((5,), 256, "int8")))
    >>> table.numel, table.row_bytes
    (305, 308)
    """

    shards: tuple[ScaledBlocks, ...]
    dtype: torch.dtype = torch.float32
    kept: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache in which twins keep tables that they have computed from the layout."""

    @cached_property
    def numel(self) -> int:
        """Elements of all shards."""
        return sum(shard.numel for shard in self.shards)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of the bytes of a scale."""
        grain = self.dtype.itemsize
        return max(grain * (shard.count - (-shard.code_bytes // grain)) for shard in self.shards)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """Sizes of the parts of all shards, in order."""
        return np.array([size for shard in self.shards for size in shard.sizes], np.int64)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """Row (elements, parts, blocks, bytes of codes) for each shard: (shards, 4)."""
        rows = [(each.numel, len(each.sizes), each.count, each.code_bytes) for each in self.shards]
        return np.array(rows, np.int64).reshape(-1, 4)

    def starts(self) -> Iterator[tuple[int, ScaledBlocks]]:
        """Pair (first element in the unit, blocks) for each shard."""
        return zip(accumulate((each.numel for each in self.shards), initial=0), self.shards, strict=False)

    def split(self, row: Tensor, shard: ScaledBlocks) -> tuple[Tensor, Tensor]:
        """Views of the scales and the codes of `shard` in its `row` (row_bytes,).

        An empty row is returned as it is: its odd storage offset allows no view of a wider type.
        """
        if row.numel() == 0:
            return row.new_empty(0, dtype=self.dtype), row
        start = shard.count * self.dtype.itemsize
        return row[:start].view(self.dtype), row[start : start + shard.code_bytes]

    def check(self, x: Tensor, rows: Tensor) -> None:
        """Raise `ValueError` unless x (numel,) and contiguous uint8 rows (shards, row_bytes) fit, and the
        type of scales does.
        """
        expected = (self.numel, (len(self.shards), self.row_bytes), torch.uint8, self.dtype)
        found = (x.numel(), tuple(rows.shape), rows.dtype, scale_type(x.dtype))
        if found != expected or not rows.is_contiguous():
            raise ValueError(f"elements, rows and types are {found}, but the shards need {expected}")


class CodedPieces:
    """Pieces of a bucket, and the places of their scales and codes in a buffer that holds the rows of all
    shards.

    Piece i holds all of the parameter with number slots[i]. Blocks have `block` elements or less and codes of
    `kind`.

    - `runs` (runs, 6) has a row per stretch that lies within one piece and one shard, in the order of pieces:
      first element in the plane, first element in the bucket, elements, number of the piece, first scale
      (counted in float32), first byte of the codes.
    - `zeros` (stretches, 2) has (first byte, bytes) of padding in the buffer.
    """

    def __init__(
        self,
        pieces: Pieces,
        slots: Sequence[int],
        runs: Sequence[tuple[int, int, int, int, int, int]],
        zeros: Sequence[tuple[int, int]],
        block: int,
        kind: BlockKind,
    ) -> None:
        self.pieces, self.block, self.kind = pieces, block, kind
        self.slots = np.array(slots, np.int64)
        self.runs = np.array(runs, np.int64).reshape(-1, 6)
        self.zeros = np.array(zeros, np.int64).reshape(-1, 2)
        self.kept: dict[Hashable, Any] = {}
        """Cache in which twins keep tables that they have computed from the layout."""

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Smallest buffer that holds all codes, in bytes, and the highest number of a parameter."""
        last = max((start + count for start, count in self.zeros.tolist()), default=0)
        for _plane, _bucket, numel, _piece, _scale, byte in self.runs.tolist():
            last = max(last, byte + ScaledBlocks((numel,), self.block, self.kind).code_bytes)
        return last, int(self.slots.max(initial=-1))


Norm = Literal["l2", "max"]


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` codes of `width` bits take when packed.

    >>> packed_bytes(3, 3)
    2
    """
    return -(-count * width // 8)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Pack `codes` (count,), integers of `width` bits, into (packed_bytes,) uint8; the last byte is padded
    with zeros.

    Code i takes bits i · width to (i + 1) · width - 1. Bit b is bit b mod 8 of byte b div 8.

    >>> pack_codes(torch.tensor([1, 2, 3]), 2)
    tensor([57], dtype=torch.uint8)
    """
    bits = (codes.long()[:, None] >> torch.arange(width, device=codes.device)) & 1
    row = torch.zeros(8 * packed_bytes(codes.numel(), width), dtype=torch.int64, device=codes.device)
    row[: bits.numel()] = bits.reshape(-1)
    places = torch.arange(8, device=codes.device)
    return (row.view(-1, 8) << places).sum(1).to(torch.uint8)


def unpack_codes(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpack `count` codes of `width` bits that `pack_codes` packed: (count,) int64.

    >>> unpack_codes(torch.tensor([57], dtype=torch.uint8), 2, 3)
    tensor([1, 2, 3])
    """
    bits = (packed.long()[:, None] >> torch.arange(8, device=packed.device)) & 1
    row = bits.reshape(-1)[: count * width].view(count, width)
    return (row << torch.arange(width, device=packed.device)).sum(1)


@dataclass(frozen=True)
class Grid:
    """Layout of a unit quantized to evenly spaced levels: its buckets, and the levels of each bucket.

    The parts of the unit have `sizes` elements. Each is cut into buckets of `bucket` elements, or is one
    bucket (None). The levels of a bucket are -levels … levels times its step, and step = norm / levels. The
    norm is Euclidean ("l2") or the largest magnitude ("max"); the latter is cut at `clip` times the root mean
    square. Codes are two's complement of 2, 4 or 8 bits, packed as by `pack_codes`; every bucket begins a new
    byte.

    >>> grid = Grid(sizes=(1000, 3), bucket=512, bits=4)
    >>> grid.levels, grid.buckets, grid.code_bytes
    (7, 3, 502)
    """

    sizes: tuple[int, ...]
    bucket: int | None
    bits: int
    norm: Norm = "l2"
    clip: float = math.inf

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits}; choose 2, 4 or 8")
        if self.bucket is not None and self.bucket < 1:
            raise ValueError(f"bucket={self.bucket} must be at least 1 element; 512 is usual")
        if self.norm not in ("l2", "max"):
            raise ValueError(f"norm={self.norm!r}; choose 'l2' or 'max'")
        if not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} must be positive; 2.5 is usual, and math.inf does not clip")

    @cached_property
    def levels(self) -> int:
        """Number of positive levels."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def width(self) -> int:
        """Elements of the longest bucket, at least 1."""
        longest = max(self.sizes, default=0)
        return max(1, longest if self.bucket is None else min(self.bucket, longest))

    @cached_property
    def buckets(self) -> int:
        """Number of buckets in all parts."""
        return sum(-(-size // self.width) for size in self.sizes)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of all packed codes."""
        full = packed_bytes(self.width, self.bits)
        return sum(
            size // self.width * full + packed_bytes(size % self.width, self.bits) for size in self.sizes
        )

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """End of each part, in elements: (parts,)."""
        return np.cumsum(self.sizes, dtype=np.int64)

    def check(self, x: Tensor, steps: Tensor, codes: Tensor) -> None:
        """Raise `ValueError` unless x, steps and codes have the sizes of this grid, and steps and codes the
        right types.
        """
        found = (x.numel(), steps.numel(), codes.numel(), steps.dtype, codes.dtype)
        right = (sum(self.sizes), self.buckets, self.code_bytes, step_type(x.dtype), torch.uint8)
        if found != right:
            raise ValueError(f"elements, steps, codes and their types are {found}, but {self} needs {right}")


def step_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the steps of tensors of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
