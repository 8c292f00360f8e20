"""Steps of a low-rank exchange over named parameters, with error feedback, and what the papers would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.exchange.base import Exchange, run
from gradwire.exchange.low_rank import Factors
from gradwire.unit.context import ExchangeContext, ExchangeState, Part


def parts_of(**shapes: tuple[int, ...]) -> tuple[Part, ...]:
    """Whole parameters."""
    return tuple(Part(name, shape, 0, int(np.prod(shape))) for name, shape in shapes.items())


def slices(parts: tuple[Part, ...]) -> dict[str, slice]:
    """Where each lies in the unit."""
    ends = list(accumulate(part.numel for part in parts))
    return {part.name: slice(end - part.numel, end) for part, end in zip(parts, ends, strict=True)}


@dataclass
class Run:
    """What one rank saw."""

    means: list[Tensor] = field(default_factory=list)
    came: list[Tensor] = field(default_factory=list)
    unsent: list[Tensor] = field(default_factory=list)
    kept: ExchangeState = field(default_factory=ExchangeState)


def steps(
    exchange: Exchange,
    gradient: Callable[[int, int], Tensor],
    parts: tuple[Part, ...],
    world: int,
    count: int,
    feedback: bool = True,
) -> list[Run]:
    """`count` committed steps on threads; `gradient(rank, step)` is the unit's."""

    def body(comm: Comm) -> Run:
        seen = Run()
        left = torch.zeros_like(gradient(comm.rank, 0))
        for number in range(count):
            ctx = ExchangeContext(number, 0, comm.rank, world, parts=parts, kept=seen.kept)
            x = gradient(comm.rank, number) + left if feedback else gradient(comm.rank, number).clone()
            seen.came.append(x.clone())
            mean = torch.full_like(x, torch.nan)
            run(exchange, x, mean, comm, ctx)
            seen.kept.commit()
            seen.means.append(mean)
            seen.unsent.append(x.clone())
            left = x
        return seen

    return run_ranks(world, body)


def drawn(factors: Factors, ctx: ExchangeContext) -> dict[str, np.ndarray]:
    """By name, (size, rank): the factors with which a run that has kept nothing begins."""
    flat = factors.recall(ctx, torch.float64, torch.device("cpu"))
    return {
        name: flat[start : start + factors.rank * size].view(factors.rank, size).numpy().T.copy()
        for name, (start, size) in zip(factors.names, factors.spans.tolist(), strict=True)
    }


def power_sgd_by_the_paper(m: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vogels et al. 2019, algorithm 1, of all ranks' matrices (world, rows, columns): the mean, and Q."""
    p = np.mean([each @ q for each in m], axis=0)
    p_hat, _ = np.linalg.qr(p)
    q = np.mean([each.T @ p_hat for each in m], axis=0)
    return p_hat @ q.T, q


def acp_sgd_by_the_paper(
    m: np.ndarray, p: np.ndarray, q: np.ndarray, is_left: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zhang et al. 2023: one factor per step, the other orthonormalised. The mean, P and Q."""
    if is_left:
        q, _ = np.linalg.qr(q)
        p = np.mean([each @ q for each in m], axis=0)
    else:
        p, _ = np.linalg.qr(p)
        q = np.mean([each.T @ p for each in m], axis=0)
    return p @ q.T, p, q
