"""Blocks of elements in 8 or 4 bits each, with a scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference_blocks
from gradwire.kernels.dispatch import is_fast

BlockKind = Literal["int8", "int4", "fp8"]

LARGEST: dict[str, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The code to which a block's maximum is mapped."""

_NUMBERS = {"int8": 0, "int4": 1, "fp8": 2}

scale_type = reference_blocks.wide


def count_blocks(sizes: Sequence[int], block: int) -> int:
    """Blocks of `block` elements or less in parts of these sizes; none lies in two parts.

    >>> count_blocks([600, 1], 256)
    4
    """
    return sum(-(-size // block) for size in sizes)


def code_bytes(sizes: Sequence[int], block: int, kind: BlockKind) -> int:
    """Bytes of the codes; those of 4 bits begin a byte with every block.

    >>> code_bytes([600, 1], 256, "int8"), code_bytes([600, 1], 256, "int4")
    (601, 301)
    """
    if kind != "int4":
        return sum(sizes)
    return sum(size // block * -(-block // 2) + -(-(size % block) // 2) for size in sizes)


def encode_blocks(
    x: Tensor, sizes: Sequence[int], block: int, kind: BlockKind, scales: Tensor, codes: Tensor, left: bool
) -> None:
    """Write scales (blocks,) of `scale_type` and codes (bytes,) uint8 of x (n,); int4 two per byte.

    Codes are x / scale to nearest, ties to even. With `left`, x keeps what is left of it.

    >>> x, scales, codes = torch.tensor([254.0, -3.2]), torch.empty(1), torch.empty(2, dtype=torch.uint8)
    >>> encode_blocks(x, [2], 256, "int8", scales, codes, left=True)
    >>> scales, codes.view(torch.int8), x
    (tensor([2.]), tensor([127,  -2], dtype=torch.int8), tensor([0.0000, 0.8000]))
    """
    _check(x, sizes, block, kind, scales, codes)
    if not is_fast(x, scales):
        scale, code = reference_blocks.encode_blocks(x, sizes, block, kind, LARGEST[kind], left)
        scales.copy_(scale)
        codes.copy_(code)
        return
    largest, arrays = np.float32(LARGEST[kind]), (scales.numpy(), codes.numpy())
    cpu.encode_blocks(x.numpy(), _array(sizes), block, _NUMBERS[kind], largest, *arrays, left)


def add_blocks(
    scales: Tensor,
    codes: Tensor,
    sizes: Sequence[int],
    block: int,
    kind: BlockKind,
    out: Tensor,
    weight: float,
) -> None:
    """out (n,) += weight · scale · code.

    >>> out, codes = torch.ones(2), torch.tensor([127, 2], dtype=torch.uint8)
    >>> add_blocks(torch.tensor([2.0]), codes, [2], 256, "int8", out, 0.5)
    >>> out
    tensor([128.,   3.])
    """
    _check(out, sizes, block, kind, scales, codes)
    if not is_fast(out, scales):
        reference_blocks.add_blocks(scales, codes, sizes, block, kind, out, weight)
        return
    arrays = (scales.numpy(), codes.numpy(), _array(sizes))
    cpu.add_blocks(*arrays, block, _NUMBERS[kind], np.float32(weight), out.numpy())


def _array(sizes: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(sizes, np.int64)


def _check(
    x: Tensor, sizes: Sequence[int], block: int, kind: BlockKind, scales: Tensor, codes: Tensor
) -> None:
    """The kernel checks no bounds."""
    expected = (sum(sizes), count_blocks(sizes, block), code_bytes(sizes, block, kind))
    found = (x.numel(), scales.numel(), codes.numel())
    if found != expected or codes.dtype != torch.uint8 or not codes.is_contiguous():
        raise ValueError(f"elements, blocks and bytes are {found}, but {expected} for {kind} in {block}s")
