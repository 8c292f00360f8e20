"""Stochastic rounding to evenly spaced levels, packed; the rest subtracted in the same pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import cpu, reference_stochastic
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.reference_bits import packed_bytes
from gradwire.kernels.reference_noise import halves

Norm = Literal["l2", "max"]


@dataclass(frozen=True)
class Grid:
    """Into which buckets a unit falls, and where the levels of a bucket lie.

    `sizes` are the elements of the unit's parts; buckets of `bucket` elements (None: whole parts) never
    straddle two of them. The levels of a bucket are the integers -levels … levels times its step, which is
    its norm / levels: Euclidean ("l2") or its largest magnitude ("max"), the latter cut at `clip` times
    the root of the mean square. Codes are two's complement of 2, 4 or 8 bits, as `reference_bits` packs
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


def step_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the steps of tensors of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def quantize(
    x: Tensor, grid: Grid, key: int, steps: Tensor, codes: Tensor, *, subtract: bool = False
) -> None:
    """Write the steps (grid.buckets,) and the packed codes (grid.code_bytes,) uint8 of x (numel,).

    Element i of the unit is rounded up or down at random, right in the mean, by word i of `key`
    (`random_words`). With `subtract`, x is left with what steps and codes do not say. NaN or Inf makes the
    step of its bucket NaN. Levels are never beyond x's type: a larger Euclidean norm is cut.

    >>> x, grid = torch.tensor([3.0, -3.0, 0.0]), Grid((3,), None, bits=8, norm="max")
    >>> steps, codes = torch.empty(1), torch.empty(3, dtype=torch.uint8)
    >>> quantize(x, grid, 7, steps, codes)
    >>> 127 * steps, codes.view(torch.int8)
    (tensor([3.]), tensor([ 127, -127,    0], dtype=torch.int8))
    """
    _check(x, grid, steps, codes)
    most = reference_stochastic.largest_step(x.dtype, grid.levels)
    if not is_fast(x, steps) or not codes.is_contiguous():
        reference_stochastic.quantize(x, grid, key, steps, codes, most)
        if subtract:
            reference_stochastic.add_quantized(steps, codes, grid, x, -1.0)
        return
    rule = grid.bits, grid.norm == "l2", float(grid.clip), np.float32(most)
    low, high = (np.uint32(half) for half in halves(key))
    cpu.quantize(x.numpy(), grid.ends, grid.width, rule, (low, high), steps.numpy(), codes.numpy(), subtract)


def add_quantized(steps: Tensor, codes: Tensor, grid: Grid, out: Tensor, weight: float) -> None:
    """out (numel,) += weight · step · code, of what `quantize` wrote.

    >>> out = torch.ones(2)
    >>> codes = torch.tensor([3, -4], dtype=torch.int8).view(torch.uint8)
    >>> add_quantized(torch.tensor([0.5]), codes, Grid((2,), None, bits=8), out, 2.0)
    >>> out
    tensor([ 4., -3.])
    """
    _check(out, grid, steps, codes)
    if not is_fast(out, steps) or not codes.is_contiguous():
        reference_stochastic.add_quantized(steps, codes, grid, out, weight)
        return
    arrays = steps.numpy(), codes.numpy(), grid.ends
    cpu.add_quantized(*arrays, grid.width, grid.bits, np.float32(weight), out.numpy())


def _check(x: Tensor, grid: Grid, steps: Tensor, codes: Tensor) -> None:
    """The kernels check no bounds."""
    found = (x.numel(), steps.numel(), codes.numel(), steps.dtype, codes.dtype)
    right = (sum(grid.sizes), grid.buckets, grid.code_bytes, step_type(x.dtype), torch.uint8)
    if found != right:
        raise ValueError(f"elements, steps, codes and their types are {found}, but {grid} needs {right}")
