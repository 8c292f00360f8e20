"""Turns of units that travel once in a cycle of steps, of ranks that lead, of factors that are sent.

Training loops are periodic: parts of a model may be trained in turn. If a fixed order had the same period,
the same unit, rank or factor would miss its turn for ever. So the order is drawn anew from time to time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

from gradwire.unit.context import ExchangeContext, number_from

Order = Literal["random", "paper"]

BLOCK = 3
"""Cycles that share one offset. A gradient waits (I + 1)/(6·I·BLOCK) longer than in a fixed order: 8 %
at I = 2."""


@lru_cache(maxsize=256)
def drawn_offset(seed: int, block: int, interval: int, whose: str = "phase") -> int:
    """Offset 0 … interval - 1 of a block of cycles, drawn uniformly from the shared `seed`. Cached, as each
    unit asks.

    >>> [drawn_offset(0, block, 4) for block in range(8)]
    [0, 0, 2, 3, 2, 1, 2, 1]
    """
    return number_from(whose, seed, block) % interval


def round_robin(ctx: ExchangeContext, interval: int, order: Order = "random", whose: str = "phase") -> int:
    """Which of 0 … interval - 1 has its turn in this step: no data dependency, every rank decides alone.

    Cycles begin at multiples of `interval`, and each has its turn once in a cycle. In the order "random" the
    phase is drawn from the shared seed every `BLOCK` cycles, for each `whose` independently: if an exchange
    that takes turns lies within another, not even their orders agree. In the order "paper" the turn is the
    step's number modulo `interval`.

    >>> [round_robin(ExchangeContext(step, unit=0, rank=0, world=2), 3, "paper") for step in range(6)]
    [0, 1, 2, 0, 1, 2]
    """
    random = order == "random"
    phase = drawn_offset(ctx.seed, ctx.step // (BLOCK * interval), interval, whose) if random else 0
    return (ctx.step + phase) % interval


def check_order(order: Order) -> Order:
    """Return `order`; raises `ValueError` if it is neither "random" nor "paper"."""
    if order not in get_args(Order):
        raise ValueError(f"order={order!r} is none of {', '.join(get_args(Order))}")
    return order
