"""What an exchange does behind every warm-up, in a step in which it does not rest: plans are for that."""

from __future__ import annotations

import torch

from gradwire.comm.base import Round
from gradwire.exchange.base import Exchange
from gradwire.moment import Kept, Moment, Part

LATE = 1 << 20
"""A committed step behind every warm-up, in which rank 0 of four leads."""
CYCLE = 840
"""The least number of steps that holds whole cycles of every interval up to 8."""


def sent(exchange: Exchange, numel: int, world: int) -> tuple[Round, ...]:
    """What a unit sends behind every warm-up, in a step in which it does not rest.

    >>> from gradwire.exchange.dense import dense
    >>> from gradwire.exchange.every import every
    >>> [each.verb for each in sent(every(4, dense()), 1000, 2)]
    ['all_reduce']
    """
    step = step_that_sends(exchange, numel, world)
    return exchange.rounds(numel, torch.float32, late_moment(numel, world, step))


def late_moment(numel: int, world: int, step: int, kept: Kept | None = None) -> Moment:
    """A unit that is one matrix, as square as powers of two allow."""
    columns = 1 << (max(numel, 1).bit_length() - 1) // 2
    shape = (numel // columns, columns) if numel % columns == 0 else (numel, 1)
    part = Part("weight", shape, 0, numel)
    return Moment(step, 0, 0, world, parts=(part,), kept=kept or Kept())


def step_that_sends(exchange: Exchange, numel: int, world: int) -> int:
    """The first late step in which rank 0 does not rest; `LATE` if it always does."""
    for step in range(LATE, LATE + CYCLE):
        if exchange.rounds(numel, torch.float32, late_moment(numel, world, step)):
            return step
    return LATE
