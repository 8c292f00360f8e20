"""Kinds of gradients on which a choice by magnitude can go wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.cpu.topk import SAMPLE


def generator(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=generator(n))


def ties(n: int) -> Tensor:
    return torch.randint(-3, 4, (n,), generator=generator(n)).float()


def constant(n: int) -> Tensor:
    return torch.full((n,), -0.5)


def zeros(n: int) -> Tensor:
    return torch.zeros(n) * normal(n).sign()  # zeros of both signs


def half_zeros(n: int) -> Tensor:
    return normal(n) * (torch.rand(n, generator=generator(n)) < 0.5)


def heavy_tail(n: int) -> Tensor:
    return normal(n) / torch.rand(n, generator=generator(n + 1)).clamp_min(1e-12) ** 2


def subnormal(n: int) -> Tensor:
    return normal(n) * 1e-40


def sorted_down(n: int) -> Tensor:
    return torch.arange(n, 0, -1).float()


def sorted_up(n: int) -> Tensor:
    return torch.arange(n).float()


def late_step(n: int) -> Tensor:
    """One value, and at the end the next larger: a threshold that rises too far misses it."""
    x = torch.ones(n)
    x[n - n // 1000 :] = 1.0 + torch.finfo(torch.float32).eps
    return x


def outlier(n: int) -> Tensor:
    x = normal(n)
    x[n // 3 : n // 3 + 1] = -1e38
    return x


def columns(n: int) -> Tensor:
    """Rows of 64 with one large column: what a fixed stride could miss or hit always."""
    x = normal(n)
    x[::64] *= 1e3
    return x


def special(n: int) -> Tensor:
    x = normal(n)
    x[torch.rand(n, generator=generator(n)) < 0.02] = float("nan")
    x[torch.rand(n, generator=generator(n + 1)) < 0.02] = -float("inf")
    x[torch.rand(n, generator=generator(n + 2)) < 0.02] = torch.finfo(torch.float32).max
    return x


def mostly_nan(n: int) -> Tensor:
    x = torch.full((n,), float("nan"))
    x[::3] = float("inf")
    x[::5] = 1.0
    return x


KINDS = (
    normal, ties, constant, zeros, half_zeros, heavy_tail, subnormal, sorted_down, sorted_up,
    late_step, outlier, columns, special, mostly_nan,
)  # fmt: skip


def drawn(n: int) -> Tensor:
    """Where the top-k's sample of n elements looks, in plain Python."""
    size, random, places = min(SAMPLE, n // 32), 1, []
    for j in range(size):
        random = (random * 6364136223846793005 + 1442695040888963407) % 2**64
        places.append(j * (n // size) + (random >> 33) % (n // size))
    return torch.tensor(places)
