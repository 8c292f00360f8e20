"""Gradients that can tell: each kind shows a mistake that the others hide."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor


def coded(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """Small integers by position and rank: sums are exact, and a misplaced element shows."""
    return ((torch.arange(size) % 13 + 1) * (rank + 1)).to(dtype)


def normal(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """What gradients look like."""
    return torch.randn(size, generator=random).to(dtype)


def zeros(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """Scales of 0, norms of 0, and k elements to choose among equals."""
    return torch.zeros(size, dtype=dtype)


def ties(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """Equal magnitudes of both signs."""
    return (torch.randint(0, 2, (size,), generator=random) * 2 - 1).to(dtype)


def half_zeros(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """Dead rows: the k-th largest may be 0."""
    keep = torch.rand(size, generator=random) < 0.5
    return (torch.randn(size, generator=random) * keep).to(dtype)


def outlier(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """One element near the end of the range, on one rank."""
    x = torch.randn(size, generator=random).to(dtype)
    if rank == 0:
        x[size // 2 : size // 2 + 1] = large
    return x


def subnormals(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """Below the normal range errors are absolute, and squares are 0."""
    return torch.rand(size, generator=random).to(dtype) * torch.finfo(dtype).smallest_normal


def constant(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """No element is larger than another, and 0.1 is not exact in any of the types."""
    return torch.full((size,), 0.1 * (rank + 1), dtype=dtype)


def poisoned(rank: int, size: int, dtype: torch.dtype, random: torch.Generator, large: float) -> Tensor:
    """NaN, Inf and −Inf on one rank: the order of rounds must survive."""
    x = torch.randn(size, generator=random).to(dtype)
    if rank == 0:
        for place, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            x[size // 3 + place : size // 3 + place + 1] = value
    return x


Kind = Callable[[int, int, torch.dtype, torch.Generator, float], Tensor]
KINDS: tuple[Kind, ...] = (
    coded, normal, zeros, ties, half_zeros, outlier, subnormals, constant, poisoned,
)  # fmt: skip


def generator(*key: object) -> torch.Generator:
    """A generator of its own for whatever `key` names, equal in every process."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
