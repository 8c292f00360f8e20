"""Numbers at which thresholds, sums and ties can go wrong; the same ones in every process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SAMPLE = 16384
"""Elements of which the kernels for top-k guess a threshold."""


def generator(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=generator(n))


def zeros(n: int) -> Tensor:
    return torch.zeros(n) * normal(n).sign()  # of both signs


def ties(n: int) -> Tensor:
    return torch.randint(-3, 4, (n,), generator=generator(n)).float()


def half_zeros(n: int) -> Tensor:
    return normal(n) * (torch.rand(n, generator=generator(n + 1)) < 0.5)


def constant(n: int) -> Tensor:
    return torch.full((n,), -0.1)


def outlier(n: int) -> Tensor:
    x = normal(n)
    x[n // 2 : n // 2 + 1] = -1e30
    return x


def heavy_tail(n: int) -> Tensor:
    return normal(n) / torch.rand(n, generator=generator(n + 1)).clamp_min(1e-9) ** 2


def subnormal(n: int) -> Tensor:
    return normal(n) * 1e-40


def largest(n: int) -> Tensor:
    return torch.full((n,), torch.finfo(torch.float32).max)


def special(n: int) -> Tensor:
    x = normal(n)
    for number, value in enumerate((torch.nan, -torch.inf, torch.finfo(torch.float32).max, -0.0)):
        x[torch.rand(n, generator=generator(n + number)) < 0.02] = value
    return x


def mostly_nan(n: int) -> Tensor:
    x = torch.full((n,), torch.nan)
    x[::3] = torch.inf
    x[::5] = 1.0
    return x


def sorted_down(n: int) -> Tensor:
    return torch.arange(n, 0, -1).float()


def sorted_up(n: int) -> Tensor:
    return torch.arange(n).float()


def late_step(n: int) -> Tensor:
    """One value, and at the end the next larger: a threshold that rises too far misses it."""
    x = torch.ones(n)
    x[n - n // 1000 :] = 1.0 + torch.finfo(torch.float32).eps
    return x


def columns(n: int) -> Tensor:
    """Rows of 64 with one large column: what a fixed stride could miss or hit always."""
    x = normal(n)
    x[::64] *= 1e3
    return x


FINITE: tuple[Callable[[int], Tensor], ...] = (
    normal, zeros, ties, half_zeros, constant, outlier, heavy_tail, subnormal, largest,
)  # fmt: skip
KINDS = (*FINITE, special, mostly_nan)
CHOICES = (*KINDS, sorted_down, sorted_up, late_step, columns)
"""Those on which a choice by magnitude can go wrong."""


def drawn(n: int) -> Tensor:
    """Where the top-k's sample of n elements looks, in plain Python."""
    size, random, places = min(SAMPLE, n // 32), 1, []
    for j in range(size):
        random = (random * 6364136223846793005 + 1442695040888963407) % 2**64
        places.append(j * (n // size) + (random >> 33) % (n // size))
    return torch.tensor(places)
