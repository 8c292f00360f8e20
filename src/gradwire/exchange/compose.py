"""Combinators, which take an exchange and return another: memory, warm-up, interval."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Exchange, Finish
from gradwire.exchange.dense import Dense
from gradwire.exchange.turns import Order, check_order, turn_of
from gradwire.laws import Laws
from gradwire.memory import UNSENT, Memory, NoMemory, Residual
from gradwire.step.context import ExchangeContext


@dataclass(frozen=True)
class Remember:
    """Give an exchange a memory; the arena folds it in before `start` and commits what is left."""

    inner: Exchange
    memory: Memory | None

    @cached_property
    def laws(self) -> Laws:
        """The laws of the inner exchange, but never in place; a memory may need numbers on the host."""
        inner = self.inner.laws
        stays = inner.stays_on_device and (self.memory is None or self.memory.stays_on_device)
        return replace(inner, in_place=False, stays_on_device=stays)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Finish:
        return self.inner.start(x, mean, comm, ctx)

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return self.inner.rounds(numel, dtype, ctx)


@dataclass(frozen=True)
class Warm:
    """Dense for the first committed steps, then the inner exchange.

    The step number is part of the state, so a resumed run does not warm up again.
    """

    steps: int
    inner: Exchange
    dense: Exchange = field(default_factory=Dense)

    @cached_property
    def laws(self) -> Laws:
        """The laws of the inner exchange, but never in place."""
        return replace(self.inner.laws, in_place=False)

    @property
    def memory(self) -> Memory | None:
        return self.inner.memory

    def _now(self, ctx: ExchangeContext) -> Exchange:
        return self.dense if ctx.step < self.steps else self.inner

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Finish:
        return self._now(ctx).start(x, mean, comm, ctx)

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return self._now(ctx).rounds(numel, dtype, ctx)


def remember(inner: Exchange, memory: Memory | None = None) -> Remember:
    """Add error feedback to `inner`; refuses an exchange that is not contractive, because it would diverge.

    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.codec.sparse import sparse
    >>> from gradwire.exchange.payloads import gather
    >>> remember(gather(sparse(top_k(0.01)))).memory
    Residual(start=1.0, rise=0.0, every=1)
    """
    if not inner.laws.contractive:
        raise ValueError(
            f"{inner} is not contractive: it can leave more unsent than it was given, which grows without "
            "bound under error feedback. Wrap it in forget(...), or take a biased codec."
        )
    return Remember(inner, memory or Residual())


def forget(inner: Exchange, memory: Memory | None = None) -> Remember:
    """Drop the part that `inner` does not send. For exchanges that are right in the mean, which `remember`
    refuses.

    A `memory` may keep other things, such as a momentum, but nothing that is unsent.

    >>> from gradwire.exchange.dense import dense
    >>> forget(dense()).memory
    NoMemory(as_arrived=False)
    """
    if memory is not None and UNSENT in memory.planes:
        raise ValueError(f"{memory} keeps what is unsent; give it to remember(...)")
    return Remember(inner, memory or NoMemory())


def warm(steps: int, inner: Exchange) -> Warm:
    """Send the first `steps` committed steps densely."""
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
    return Warm(steps, inner)


@dataclass(frozen=True)
class Every:
    """COVAP's coarse filter (Meng et al. 2023, section III-A): each unit travels once in a cycle of I steps.

    Unit t is exchanged at step s iff (t + s + phase) mod I = 0; the others hand zeros to the optimizer.
    Cycles begin at multiples of I. The phase is drawn from the shared seed every three cycles, so that a
    unit whose parameters have gradients in every second step, say, does not miss its turn for ever. From one
    block to the next, its turns are 1 to 2·I - 1 steps apart. With the order "paper" the phase is always 0.

    With `together`, all units are exchanged in the same steps, those of unit 1.
    """

    interval: int
    inner: Exchange
    together: bool = False
    order: Order = "random"

    @cached_property
    def laws(self) -> Laws:
        """The laws of the inner exchange, since a cycle of I steps sends everything; but never in place."""
        inner = self.inner.laws
        return replace(inner, in_place=False, cycle=lcm(self.interval, inner.cycle))

    @property
    def memory(self) -> Memory | None:
        return self.inner.memory

    def sends(self, ctx: ExchangeContext) -> bool:
        """Whether the unit travels in this step: no data dependency, every rank decides alone."""
        unit = 1 if self.together else ctx.unit
        return (unit + turn_of(ctx, self.interval, self.order)) % self.interval == 0

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Finish:
        if self.sends(ctx):
            return self.inner.start(x, mean, comm, ctx)
        mean.zero_()
        return lambda: None

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return self.inner.rounds(numel, dtype, ctx) if self.sends(ctx) else ()


def every(interval: int, inner: Exchange, *, together: bool = False, order: Order = "random") -> Every:
    """Exchange each unit once in `interval` steps, one after another or all `together`.

    >>> paper = every(3, Dense(), order="paper")
    >>> [paper.sends(ExchangeContext(step, unit=1, rank=0, world=2)) for step in range(6)]
    [False, False, True, False, False, True]
    """
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(
            f"interval={interval!r} must be at least 1 step, in whole steps; 1 sends everything always"
        )
    return Every(interval, inner, together, check_order(order))
