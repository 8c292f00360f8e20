"""Two steps of an exchange on a unit of several parameters, in a world of threads."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire.comm import Comm
from gradwire.exchange.base import STEADY, Exchange, run
from gradwire.unit.context import ExchangeContext, Part, Replicated
from tests.support.compensation import Compensation

SHAPES = ((60, 100), (3,), (2_999,))


def like_all(name: str) -> Replicated:
    """A parameter of SHAPES, and an optimizer without a state."""
    parameter = torch.ones(SHAPES[int(name)], requires_grad=True)
    [group] = torch.optim.SGD([parameter], lr=0.1).param_groups
    return Replicated(parameter.detach(), group, {}, torch.optim.SGD)


def train(exchange: Exchange, comm: Comm) -> None:
    """Two steps behind any warm-up of a unit of several parameters."""
    specs = [Part(str(number), shape, 0, torch.Size(shape).numel()) for number, shape in enumerate(SHAPES)]
    total = sum(part.numel for part in specs)
    compensation = None if exchange.memory is None else Compensation(exchange.memory, total)
    ctx = ExchangeContext(STEADY, 1, comm.rank, comm.world, parts=tuple(specs), replicas=like_all)
    for step in range(STEADY, STEADY + 2):
        grad = torch.randn(total, generator=torch.Generator().manual_seed(8 * step + comm.rank))
        x = grad if compensation is None else compensation.compensate(grad, step, comm.world)
        ctx = replace(
            ctx, step=step, unsent=None if compensation is None else compensation.committed.get("unsent")
        )
        if exchange.rounds(total, torch.float32, ctx):
            run(exchange, x, torch.empty_like(x), comm, ctx)
        ctx.kept.commit()
        if compensation is not None:
            compensation.commit()
