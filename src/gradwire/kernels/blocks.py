"""Blocks of elements in 8 or 4 bits each, with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import cpu, reference_blocks
from gradwire.kernels.dispatch import is_fast

BlockKind = Literal["int8", "int4", "fp8"]

LARGEST: dict[str, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The code to which a block's maximum is mapped."""

_NUMBERS = {"int8": 0, "int4": 1, "fp8": 2}

scale_type = reference_blocks.wide


@dataclass(frozen=True)
class ScaledBlocks:
    """Parts of `sizes` elements, each cut into blocks of `block` elements or less, coded as `kind`.

    None lies in two parts. Codes of 4 bits begin a byte with every block.

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
        """Blocks of all parts; an empty one has none."""
        return sum(-(-size // self.block) for size in self.sizes)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        if self.kind != "int4":
            return self.numel
        whole = -(-self.block // 2)
        return sum(size // self.block * whole + -(-(size % self.block) // 2) for size in self.sizes)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The sizes."""
        return np.array(self.sizes, np.int64)


def encode_blocks(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor, left: bool) -> None:
    """Write scales (blocks,) of `scale_type` and codes (bytes,) uint8 of x (n,); int4 two per byte.

    Codes are x / scale to nearest, ties to even. With `left`, x keeps what is left of it.

    >>> x, scales, codes = torch.tensor([254.0, -3.2]), torch.empty(1), torch.empty(2, dtype=torch.uint8)
    >>> encode_blocks(x, ScaledBlocks((2,), 256, "int8"), scales, codes, left=True)
    >>> scales, codes.view(torch.int8), x
    (tensor([2.]), tensor([127,  -2], dtype=torch.int8), tensor([0.0000, 0.8000]))
    """
    _check(x, blocks, scales, codes)
    largest, block, kind = LARGEST[blocks.kind], blocks.block, blocks.kind
    if not is_fast(x, scales):
        scale, code = reference_blocks.encode_blocks(x, blocks.sizes, block, kind, largest, left)
        scales.copy_(scale)
        codes.copy_(code)
        return
    arrays = (scales.numpy(), codes.numpy())
    cpu.encode_blocks(x.numpy(), blocks.array, block, _NUMBERS[kind], np.float32(largest), *arrays, left)


def add_blocks(scales: Tensor, codes: Tensor, blocks: ScaledBlocks, out: Tensor, weight: float) -> None:
    """out (n,) += weight · scale · code.

    >>> out, codes = torch.ones(2), torch.tensor([127, 2], dtype=torch.uint8)
    >>> add_blocks(torch.tensor([2.0]), codes, ScaledBlocks((2,), 256, "int8"), out, 0.5)
    >>> out
    tensor([128.,   3.])
    """
    _check(out, blocks, scales, codes)
    if not is_fast(out, scales):
        sizes, block, kind = blocks.sizes, blocks.block, blocks.kind
        reference_blocks.add_blocks(scales, codes, sizes, block, kind, out, weight)
        return
    arrays = (scales.numpy(), codes.numpy(), blocks.array)
    cpu.add_blocks(*arrays, blocks.block, _NUMBERS[blocks.kind], np.float32(weight), out.numpy())


def _check(x: Tensor, blocks: ScaledBlocks, scales: Tensor, codes: Tensor) -> None:
    """The kernel checks no bounds."""
    expected = (blocks.numel, blocks.count, blocks.code_bytes)
    found = (x.numel(), scales.numel(), codes.numel())
    if found != expected or codes.dtype != torch.uint8 or not codes.is_contiguous():
        where = f"for {blocks.kind} in {blocks.block}s"
        raise ValueError(f"elements, blocks and bytes are {found}, but {expected} {where}")
