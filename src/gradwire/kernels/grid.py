"""Buckets and levels of stochastic rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Norm = Literal["l2", "max"]


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` codes of `width` bits.

    >>> packed_bytes(3, 3)
    2
    """
    return -(-count * width // 8)


@dataclass(frozen=True)
class Grid:
    """Into which buckets a unit falls, and where the levels of a bucket lie.

    `sizes` are the elements of the unit's parts; buckets of `bucket` elements (None: whole parts) never
    straddle two of them. The levels of a bucket are the integers -levels … levels times its step, which is
    its norm / levels: Euclidean ("l2") or its largest magnitude ("max"), the latter cut at `clip` times
    the root of the mean square. Codes are two's complement of 2, 4 or 8 bits, as `reference.bits` packs
    them, and start at a whole byte in every bucket.

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
        """Levels above 0."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def width(self) -> int:
        """Elements of the longest bucket."""
        longest = max(self.sizes, default=0)
        return max(1, longest if self.bucket is None else min(self.bucket, longest))

    @cached_property
    def buckets(self) -> int:
        """How many."""
        return sum(-(-size // self.width) for size in self.sizes)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of all codes."""
        full = packed_bytes(self.width, self.bits)
        return sum(
            size // self.width * full + packed_bytes(size % self.width, self.bits) for size in self.sizes
        )

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where the parts end."""
        return np.cumsum(self.sizes, dtype=np.int64)

    def check(self, x: Tensor, steps: Tensor, codes: Tensor) -> None:
        """Raise `ValueError` unless elements, steps and packed codes are of this grid, and of their types."""
        found = (x.numel(), steps.numel(), codes.numel(), steps.dtype, codes.dtype)
        right = (sum(self.sizes), self.buckets, self.code_bytes, step_type(x.dtype), torch.uint8)
        if found != right:
            raise ValueError(f"elements, steps, codes and their types are {found}, but {self} needs {right}")


def step_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the steps of tensors of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
