"""The plan of an exchange: everything that stays the same from step to step, worked out once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comm import Round
from gradwire.exchange.base import Exchange, Start
from gradwire.exchange.compose import Scheme
from gradwire.laws import phase_of
from gradwire.unit.context import ExchangeContext

MOST_PHASES = 1024
"""Most phases whose collectives are cached: a schedule that never repeats must not fill memory."""


class UnitCaptures(Protocol):
    """Captures stretches of kernels in graphs, for the units of an installed recipe."""

    are_allowed: bool
    """Whether the running step may capture and replay. Set when it begins."""

    def memory_bytes(self) -> int:
        """Bytes of the device's memory that the graphs keep."""

    def around(self, exchange: Exchange, label: str) -> Start | None:
        """The start of `exchange` of the unit `label` with graphs; `None` if none of it is captured."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of an exchange in the steps of one phase."""

    start: Start
    """Issues them. Of a scheme, that of the exchange that its schedule runs in this phase."""
    rounds: tuple[Round, ...]
    """The collectives in order, the same on all ranks. If there are none, the unit rests."""
    wire_bytes: float | None
    """Bytes that a rank sends, in the mean over ranks; `None` if ranks agree on sizes while the step runs."""
    may_fail: bool
    """True if a rank may still fail alone once its bytes have come.

    With checksums, damage is noticed only by the rank that received it; damage to a sum is reported to all.
    """
    is_captured: bool = False
    """True if its kernels are captured in graphs, which repeat addresses."""


@dataclass(eq=False)
class ExchangePlan:
    """The plan of one exchange of `numel` elements of `dtype`: of a unit, or of neighbours in a bucket.

    `ctx` is its context, but for what differs from step to step (`ExchangeContext.at`). `checked` says
    whether the transport checks messages.
    """

    label: str
    exchange: Exchange
    numel: int
    dtype: torch.dtype
    ctx: ExchangeContext
    checked: bool
    captures: UnitCaptures | None = None
    """Captures stretches of the exchange's kernels; `None` if none are captured."""
    may_overflow: bool = field(init=False)
    """True if finite inputs can give a mean that is not finite."""
    _by_phase: dict[Hashable, Collectives] = field(default_factory=dict, init=False)
    _mean: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        laws = self.exchange.laws
        self.may_overflow, self._is_total, self._is_fixed = laws.may_overflow, laws.total, laws.fixed_rounds

    def collectives(self, ctx: ExchangeContext) -> Collectives:
        """The collectives in the step of `ctx`. An exchange without phases is asked in every step."""
        phase = () if self._is_fixed else phase_of(self.exchange, ctx)
        if phase is None:
            return self._asked(ctx, None)
        found = self._by_phase.get(phase)
        if found is None:
            if len(self._by_phase) >= MOST_PHASES:
                self._by_phase.clear()
            # A graph belongs to a phase, in which it is the same exchange.
            found = self._by_phase[phase] = self._asked(ctx, self.captures)
        return found

    def room(self, x: Tensor, agreed: Collectives) -> Tensor:
        """Uninitialised memory like x for a mean that does not land in a bucket. It is the same in all steps
        if kernels are captured.
        """
        if not agreed.is_captured:
            return torch.empty_like(x)
        if self._mean is None:
            self._mean = torch.empty_like(x)
        return self._mean

    @property
    def room_bytes(self) -> int:
        """Bytes of the `room` that is the same in all steps."""
        return 0 if self._mean is None else self._mean.nbytes

    def _asked(self, ctx: ExchangeContext, captures: UnitCaptures | None) -> Collectives:
        now = self.exchange.now(ctx) if isinstance(self.exchange, Scheme) else self.exchange
        rounds = () if now is None else now.rounds(self.numel, self.dtype, ctx)
        is_known = not any(each.at_most for each in rounds)
        wire_bytes = sum(each.wire_bytes(ctx.world) for each in rounds) if is_known else None
        checks = self.checked and any(each.verb != "all_reduce" for each in rounds)
        running = self.exchange if now is None else now
        captured = None if captures is None else captures.around(running, self.label)
        start = captured or running.start
        return Collectives(start, rounds, wire_bytes, checks or not self._is_total, captured is not None)
