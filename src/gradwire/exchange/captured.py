"""Stretches of kernels before and after an all-gather, captured in graphs and replayed as one launch each.

A graph holds kernels only. The all-gather between two stretches is issued as ever. So ranks need not agree on
which of them has captured what: each issues the same collectives in the same order.

A graph repeats addresses and numbers. So there is one for each pair of addresses of a unit and its mean, and
only for exchanges whose numbers are the same in all steps (`Laws.repeats`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from gradwire.comm.base import Comm
from gradwire.exchange.base import Decode, Exchange
from gradwire.exchange.payloads import Gather
from gradwire.kernels.graphs import Graph, Graphs
from gradwire.kernels.uploads import holding
from gradwire.unit.context import ExchangeContext

_LOG = logging.getLogger("gradwire")

EAGER = 2
"""Usual steps with the same addresses that run before one captures: they compile kernels and send tables."""
MOST = 8
"""Pairs of addresses of a unit whose graphs are kept. Usually there are two: a memory that is committed
changes places with the one that the next step writes."""


class Captures:
    """See `gradwire.step.plan.Captures`.

    Of exchanges, `Gather` of a codec that repeats itself and decodes all ranks in one call is captured, as in
    `topk`. All others stay eager.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.is_usual = False
        self.graphs = graphs

    def around(self, exchange: Exchange, label: str) -> Exchange:
        if not isinstance(exchange, Gather):
            return exchange
        codec = exchange.codec
        if not (codec.laws.repeats and hasattr(codec, "average_decoded")):
            return exchange
        return CapturedGather(codec, captures=self, label=label)


@dataclass
class _Stretches:
    """The graphs of a unit and a mean at two addresses, and what they have in common."""

    begun: int = 0
    """Usual steps so far."""
    encode: Graph | None = None
    decode: Graph | None = None
    payload: Tensor | None = None
    """Written by `encode`, and sent by the all-gather."""
    payloads: Tensor | None = None
    """Received by the all-gather, and read by `decode`."""
    told: list[tuple[Tensor, str]] = field(default_factory=list)
    """Findings that `decode` writes, for `ExchangeContext.see`."""
    tables: list[Any] = field(default_factory=list)
    """Tables that the graphs read."""


@dataclass(frozen=True)
class CapturedGather(Gather):
    """`Gather` of one unit, whose kernels are replayed in usual steps."""

    captures: Captures = field(kw_only=True)
    label: str = field(kw_only=True)
    _known: dict[tuple[int, int], _Stretches] = field(default_factory=dict, init=False, compare=False)
    _failures: list[RuntimeError] = field(default_factory=list, init=False, compare=False)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        if not self.captures.is_usual:
            return super().start(x, mean, comm, ctx)
        here = self._known.get((x.data_ptr(), mean.data_ptr()))
        if here is None or here.encode is None:
            here = self._captured(x, mean, comm, ctx)
            if here is None:
                return super().start(x, mean, comm, ctx)
        assert here.encode is not None
        assert here.payload is not None
        assert here.payloads is not None
        here.encode.replay()
        pending, found = comm.all_gather(here.payloads, here.payload), here

        def decode() -> None:
            pending.wait()
            if found.decode is None and not self._capture_decode(found, mean, ctx):
                return
            assert found.decode is not None
            found.decode.replay()
            for sound, complaint in found.told:
                ctx.see(sound, complaint)

        return decode

    def _captured(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> _Stretches | None:
        """Capture the stretch before the all-gather; `None` if it is too early, or cannot be."""
        if self._failures:
            return None
        if len(self._known) >= MOST and (x.data_ptr(), mean.data_ptr()) not in self._known:
            self._known.clear()  # addresses that come back are captured again
        here = self._known.setdefault((x.data_ptr(), mean.data_ptr()), _Stretches())
        here.begun += 1

        def encode() -> None:
            here.payload = self.codec.take(x, ctx)
            here.payloads = here.payload.new_empty(comm.world, here.payload.numel())

        if here.begun <= EAGER:
            return None
        here.encode = self._capture(here, encode)
        return None if here.encode is None else here

    def _capture_decode(self, here: _Stretches, mean: Tensor, ctx: ExchangeContext) -> bool:
        """Capture the stretch after the all-gather. If it cannot be, decode at once, and return False."""
        average: Any = self.codec.average_decoded  # type: ignore[attr-defined]
        aside = replace(ctx, see=lambda sound, complaint: here.told.append((sound, complaint)))
        aside.with_constants(ctx.constants)
        here.decode = self._capture(here, lambda: average(here.payloads, mean, aside))
        if here.decode is None:
            average(here.payloads, mean, ctx)
        return here.decode is not None

    def _capture(self, here: _Stretches, work: Callable[[], None]) -> Graph | None:
        """Capture `work`; `None` if that fails, and then this unit stays eager."""
        graph = self.captures.graphs()
        try:
            with holding() as tables:
                graph.capture(work)
        except RuntimeError as error:
            self._failures.append(error)
            self._known.clear()
            _LOG.warning(
                "kernels of %s cannot be captured, and are launched one by one: %s", self.label, error
            )
            return None
        here.tables.extend(tables)
        return graph
