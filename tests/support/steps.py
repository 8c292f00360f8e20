"""One step of an exchange on threads, with what came out on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.exchange.base import Exchange, run
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext


class Stepped(NamedTuple):
    """What one rank holds after a step."""

    mean: Tensor
    unsent: Tensor
    rounds: list[Round]


def step(
    exchange: Exchange, inputs: Callable[[int], Tensor], world: int, number: int = 0, unit: int = 0
) -> list[Stepped]:
    """Run `exchange` on the tensors `inputs(rank)`."""

    def body(comm: ThreadComm) -> Stepped:
        x, metered = inputs(comm.rank).clone(), MeteredComm(comm)
        mean = torch.full_like(x, torch.nan)
        run(exchange, x, mean, metered, ExchangeContext(number, unit, comm.rank, comm.world))
        return Stepped(mean, x, metered.rounds)

    return run_ranks(world, body)
