"""Schemes: an exchange with a memory and a schedule, and the functions that compose them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Decode, Exchange, RowCoder
from gradwire.exchange.dense import Dense
from gradwire.exchange.round_robin import Order, check_order, round_robin
from gradwire.laws import Laws, joint_phase, phase_of
from gradwire.memory import UNSENT, Memory, NoMemory, Residual
from gradwire.unit.context import ExchangeContext


class Schedule(Protocol):
    """Rule that says in which steps a unit travels, and by which exchange. In each cycle of `cycle` steps it
    travels once.
    """

    @property
    def cycle(self) -> int: ...

    def phase(self, ctx: ExchangeContext) -> Hashable:
        """Key of the exchange that runs in this step.

        It depends on the context alone, so that every rank decides alone and all decide alike.
        """
        ...

    def now(self, aggregation: Exchange, phase: Hashable) -> Exchange | None:
        """The exchange that runs in a `phase`: `aggregation` or another one; `None` if the unit rests."""
        ...


@dataclass(frozen=True)
class Always:
    """Schedule by which every unit travels in every step."""

    cycle = 1

    def phase(self, ctx: ExchangeContext) -> Hashable:
        return ()

    def now(self, aggregation: Exchange, phase: Hashable) -> Exchange:
        return aggregation


@dataclass(frozen=True)
class WarmUp:
    """Schedule that sends densely for the first `steps` committed steps.

    The step number is part of a saved state, so that a resumed run does not warm up again.
    """

    steps: int
    dense: Exchange = field(default_factory=Dense)
    cycle = 1

    def phase(self, ctx: ExchangeContext) -> bool:
        """True during the warm-up."""
        return ctx.step < self.steps

    def now(self, aggregation: Exchange, phase: Hashable) -> Exchange:
        return self.dense if phase else aggregation


@dataclass(frozen=True)
class EveryK:
    """COVAP's coarse filter (Meng et al. 2023, section III-A): each unit travels once in a cycle of I steps.

    Unit t is exchanged at step s iff (t + s + phase) mod I = 0; the others hand zeros to the optimizer.
    Cycles begin at multiples of I. The phase is drawn from the shared seed every three cycles, so that a
    unit whose parameters have gradients in every second step, say, does not miss its turn for ever. From one
    block to the next, its turns are 1 to 2·I - 1 steps apart. With the order "paper" the phase is always 0.

    With `together`, all units are exchanged in the same steps, those of unit 1.

    >>> paper = EveryK(3, order="paper")
    >>> [paper.phase(ExchangeContext(step, unit=1, rank=0, world=2)) for step in range(6)]
    [False, False, True, False, False, True]
    """

    interval: int
    together: bool = False
    order: Order = "random"

    @property
    def cycle(self) -> int:
        return self.interval

    def phase(self, ctx: ExchangeContext) -> bool:
        """True if the unit travels in this step."""
        unit = 1 if self.together else ctx.unit
        return (unit + round_robin(ctx, self.interval, self.order)) % self.interval == 0

    def now(self, aggregation: Exchange, phase: Hashable) -> Exchange | None:
        return aggregation if phase else None


@dataclass(frozen=True)
class Scheme:
    """An aggregation (an exchange over a codec or selector), its memory, and its schedule.

    The reducer adds the memory before `start`, and commits the unsent part afterwards. A scheme is an
    exchange itself, and can be the aggregation of another one; then only the outer memory counts.
    """

    aggregation: Exchange
    memory: Memory | None = None
    schedule: Schedule = Always()

    @cached_property
    def laws(self) -> Laws:
        """Laws of the aggregation, with four changes.

        Never in place. On the device only if the memory stays there, too. The cycle includes the schedule's.
        Rounds are fixed only if every unit travels in every step.
        """
        laws, memory = self.aggregation.laws, self.memory
        return replace(
            laws,
            in_place=False,
            stays_on_device=laws.stays_on_device and (memory is None or memory.stays_on_device),
            cycle=lcm(self.schedule.cycle, laws.cycle),
            fixed_rounds=laws.fixed_rounds and isinstance(self.schedule, Always),
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """Phase of the schedule, joined with that of the exchange that runs."""
        phase = self.schedule.phase(ctx)
        now = self.schedule.now(self.aggregation, phase)
        return joint_phase(phase, () if now is None else phase_of(now, ctx))

    def now(self, ctx: ExchangeContext) -> Exchange | None:
        """The exchange that runs in the phase of `ctx`, in schemes of schemes the innermost; `None` if the
        unit rests."""
        now = self.schedule.now(self.aggregation, self.schedule.phase(ctx))
        return now.now(ctx) if isinstance(now, Scheme) else now

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        now = self.now(ctx)
        if now is not None:
            return now.start(x, mean, comm, ctx)
        mean.zero_()
        return lambda: None

    def ahead(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> Sequence[RowCoder] | None:
        """Coders as `gradwire.exchange.scatter_reduce.ScatterReduce.ahead` returns them; `None` unless every
        unit travels in every step.
        """
        inner = getattr(self.aggregation, "ahead", None)
        if inner is None or not isinstance(self.schedule, Always):
            return None
        coders: Sequence[RowCoder] | None = inner(numel, dtype, ctx)
        return coders

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        now = self.now(ctx)
        return () if now is None else now.rounds(numel, dtype, ctx)


@dataclass(frozen=True)
class Merged:
    """An exchange that takes all parameters of a unit for one tensor, which then has one scale.

    MergeComp's algorithm 1 (Wang et al. 2021, section 4.1): the tensors of a group are merged, and compressed
    in one operation. For exchanges that need neither names nor shapes of parameters.
    """

    aggregation: Exchange
    memory = None

    @property
    def laws(self) -> Laws:
        return self.aggregation.laws

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the exchange."""
        return phase_of(self.aggregation, _without_parts(ctx))

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        return self.aggregation.start(x, mean, comm, _without_parts(ctx))

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return self.aggregation.rounds(numel, dtype, _without_parts(ctx))


def _without_parts(ctx: ExchangeContext) -> ExchangeContext:
    return ctx.within(ctx.unit, (), ctx.once(_own_constants), ctx.unsent)


def _own_constants(_ctx: ExchangeContext) -> dict[Hashable, Any]:
    return {}


def merged(inner: Exchange) -> Exchange:
    """Let `inner` take all parameters of a unit for one tensor (`Merged`), with the memory and schedule that
    it has.

    >>> from gradwire.codec.signs import sign
    >>> from gradwire.exchange.payloads import gather
    >>> from gradwire.unit.context import Part
    >>> ctx = ExchangeContext(0, 0, 0, 2, parts=(Part("a", (8,), 0, 8), Part("b", (8,), 0, 8)))
    >>> for exchange in (gather(sign()), merged(gather(sign()))):
    ...     print(exchange.rounds(16, torch.float32, ctx)[0].payload_bytes)
    12
    8
    """
    if isinstance(inner, Scheme):
        return replace(inner, aggregation=merged(inner.aggregation))
    return Merged(inner)


def _scheme(inner: Exchange) -> Scheme:
    """`inner` itself if it is a scheme; else a scheme that always runs it."""
    return inner if isinstance(inner, Scheme) else Scheme(inner, getattr(inner, "memory", None))


def _scheduled(inner: Exchange, schedule: Schedule) -> Scheme:
    scheme = _scheme(inner)
    if isinstance(scheme.schedule, Always):
        return replace(scheme, schedule=schedule)
    return Scheme(scheme, scheme.memory, schedule)


def remember(inner: Exchange, memory: Memory | None = None) -> Scheme:
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
    return replace(_scheme(inner), memory=memory or Residual())


def forget(inner: Exchange, memory: Memory | None = None) -> Scheme:
    """Drop the part that `inner` does not send. For exchanges that are right in the mean, which `remember`
    refuses.

    A `memory` may keep other things, such as a momentum, but nothing that is unsent.

    >>> from gradwire.exchange.dense import dense
    >>> forget(dense()).memory
    NoMemory(as_arrived=False)
    """
    if memory is not None and UNSENT in memory.planes:
        raise ValueError(f"{memory} keeps what is unsent; give it to remember(...)")
    return replace(_scheme(inner), memory=memory or NoMemory())


def warm(steps: int, inner: Exchange) -> Scheme:
    """Send the first `steps` committed steps densely; 0 sends all as `inner` does.

    Raises `ValueError` for negative `steps`.

    >>> from gradwire.exchange.low_rank import power_sgd
    >>> remember(warm(100, power_sgd())) == warm(100, remember(power_sgd()))
    True
    """
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
    return _scheduled(inner, WarmUp(steps)) if steps else _scheme(inner)


def every(interval: int, inner: Exchange, *, together: bool = False, order: Order = "random") -> Scheme:
    """Exchange each unit once in `interval` steps (`EveryK`), one after another or all `together`.

    Raises `ValueError` unless `interval` is a whole number from 1 on.

    >>> paper = every(3, Dense(), order="paper")
    >>> contexts = [ExchangeContext(step, unit=1, rank=0, world=2) for step in range(6)]
    >>> [len(paper.rounds(100, torch.float32, ctx)) for ctx in contexts]
    [0, 0, 1, 0, 0, 1]
    """
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(
            f"interval={interval!r} must be at least 1 step, in whole steps; 1 sends everything always"
        )
    schedule = EveryK(interval, together, check_order(order))
    return _scheduled(inner, schedule) if interval > 1 else _scheme(inner)
