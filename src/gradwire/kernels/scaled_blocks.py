"""Blocks of elements in 8 or 4 bits each, with a scale per block: where scales and codes lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BlockKind = Literal["int8", "int4", "fp8"]

LARGEST: dict[str, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The code to which a block's maximum is mapped."""


def scale_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the scales, and in which codes are found: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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

    def check(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Raise `ValueError` unless elements, scales and contiguous bytes are of these blocks."""
        expected = (self.numel, self.count, self.code_bytes)
        found = (x.numel(), scales.numel(), codes.numel())
        if found != expected or codes.dtype != torch.uint8 or not codes.is_contiguous():
            where = f"for {self.kind} in {self.block}s"
            raise ValueError(f"elements, blocks and bytes are {found}, but {expected} {where}")
