"""Blocks of elements that are coded together, and never reach from one part of a unit into the next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Parts of `sizes` elements, each cut into blocks of `size` elements; the last may be shorter.

    No `size` makes every part one block. Bits are packed part by part, each from a byte of its own.

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
        """Elements from one block to the next of a part: at least as many as it has where it is one block."""
        return self.size or max(self.numel, 1)

    @cached_property
    def count(self) -> int:
        """Blocks of all parts; an empty one has none."""
        return sum(-(-size // self.step) for size in self.sizes)

    @cached_property
    def bytes(self) -> int:
        """Bytes of one bit per element."""
        return sum(-(-size // 8) for size in self.sizes)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Where parts start, and the end of the last (parts + 1,)."""
        return np.fromiter(accumulate(self.sizes, initial=0), np.int64, len(self.sizes) + 1)

    def check(self, x: Tensor, levels: Tensor, packed: Tensor) -> None:
        """Raise `ValueError` unless elements, levels (count, 1 or 2) and contiguous bytes fit."""
        if x.shape != (self.numel,) or packed.shape != (self.bytes,) or packed.dtype != torch.uint8:
            raise ValueError(f"{self} do not fit {tuple(x.shape)} elements and {tuple(packed.shape)} bytes")
        if levels.shape not in ((self.count, 1), (self.count, 2)) or not packed.is_contiguous():
            raise ValueError(f"{self} need levels (blocks, 1 or 2) and bytes in a row")
