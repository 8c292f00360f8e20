"""Stretches of kernels between collectives, captured in graphs and replayed as one launch each.

A graph holds kernels only. The collectives between the stretches are issued as ever. So ranks need not agree
on which of them has captured what: each issues the same collectives in the same order.

A graph repeats addresses and numbers. So there is a *tape* of a unit, its graphs and its collectives in their
order, for each pair of addresses of the unit and its mean, for each phase, and for each turn of this rank.
Only exchanges are captured whose numbers are the same in all steps of these (`Laws.repeats`). What they keep
from step to step changes its address, so it is copied to memory that the tape reads, and from memory that the
tape writes.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Pending, Round
from gradwire.exchange.base import Decode, Exchange, Start
from gradwire.kernels.graphs import Graph, Graphs
from gradwire.kernels.uploads import TooEarly, holding
from gradwire.unit.context import ExchangeContext, ExchangeState

T = TypeVar("T")

_LOG = logging.getLogger("gradwire")

_CAPTURES = threading.Lock()
EAGER = 2
"""Steps with the same addresses that run before one captures: they compile kernels and send tables."""
MOST = 8
"""Tapes of a unit that are kept. Usually there are two: a memory that is committed changes places with the
one that the next step writes."""
TRIES = 16
"""Captures of a unit in a row that may be too early, as before its first factors are there."""


class Captures:
    """See `gradwire.step.plan.UnitCaptures`. Exchanges of units that repeat themselves are captured."""

    def __init__(self, graphs: Graphs) -> None:
        self.are_allowed = False
        self.graphs = graphs
        self.memory_bytes = graphs.memory_bytes

    def around(self, exchange: Exchange, label: str) -> Start | None:
        return CapturedExchange(exchange, self, label).start if exchange.laws.repeats else None


class _CapturedContext(ExchangeContext):
    """The context of a step that is captured. What it draws would be the same in all steps."""

    def _generator(self, who: int) -> torch.Generator:
        raise TooEarly

    def once(self, make: Callable[..., T], *of: Hashable) -> T:
        if (make, *of) not in self.constants:
            raise TooEarly
        return super().once(make, *of)


class _Kept(ExchangeState):
    """State of an exchange, at addresses that do not change.

    Before the first graph runs, what was kept is copied to `recalled`. So this memory is taken before that of
    kernels, which would be used again: then a graph would overwrite what a later one reads.
    """

    def __init__(self, ctx: ExchangeContext, where: torch.device) -> None:
        super().__init__()
        names = {part.name for part in ctx.parts}
        self._rooms = {
            (kind, name): torch.empty_like(kept, device=where)
            for kind, by_name in ctx.kept.committed.items()
            for name, kept in by_name.items()
            if name in names
        }
        self.recalled: dict[tuple[str, str], Tensor] = {}
        self.left: dict[tuple[str, str], Tensor] = {}

    def get(self, kind: str, name: str) -> Tensor:
        if (kind, name) not in self._rooms:
            raise TooEarly
        return self.recalled.setdefault((kind, name), self._rooms[kind, name])

    def put(self, kind: str, name: str, tensor: Tensor) -> None:
        self.left[kind, name] = tensor


class _Recorder(Comm):
    """Ends a graph at each collective, and begins the next one where the collective is waited for. Nothing is
    sent.
    """

    def __init__(self, comm: Comm, graphs: Callable[[], Graph]) -> None:
        self.rank, self.world, self._graphs = comm.rank, comm.world, graphs
        self.sent: list[tuple[Graph, Round, Tensor, Tensor]] = []
        self._graph: Graph | None = None

    def wait(self) -> None:
        """Begin the next graph. See `Pending`, which this is, too."""
        if self._graph is not None:
            raise RuntimeError("a collective is waited for that was not issued, or twice")
        self._graph = self._graphs()
        self._graph.begin()

    def then(self, callback: Callable[[], None]) -> None:
        raise RuntimeError("a collective of a graph is waited for")

    def stop(self) -> Graph:
        """End the graph, and return it."""
        if self._graph is None:
            raise RuntimeError("a collective is not waited for")
        graph, self._graph = self._graph, None
        graph.end()
        return graph

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        self.sent.append((self.stop(), round_, tensor, out))
        return self

    def give_up(self) -> None:
        """End a graph that has failed. That it may be empty need not be said."""
        if self._graph is not None:
            with suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.stop()


@dataclass(frozen=True)
class _Tape:
    """Graphs and collectives of a unit. Whatever they read or write is kept alive by `holds`.

    Its graphs share memory with one another, but with no other tape: other units begin before this one is
    decoded. This one does not begin again before: a step ends when all its units are decoded, or no later one
    exchanges anything (`Reducer.broken`).
    """

    sent: tuple[tuple[Graph, Round, Tensor, Tensor], ...]
    """Graphs, each with the collective that follows it: what is handed in, and what takes what comes."""
    last: Graph
    """Follows the last collective."""
    told: tuple[tuple[Tensor, str], ...]
    """Findings that the graphs write, for `ExchangeContext.see`."""
    recalled: dict[tuple[str, str], Tensor]
    """Memory from which the graphs read what was kept, by kind and name."""
    kept: dict[tuple[str, str], Tensor]
    """Memory to which they write what is to be kept."""
    holds: tuple[Any, ...]

    def recall(self, state: ExchangeState) -> bool:
        """Copy what was kept to where the graphs read it. Return False if it is not what they can read."""
        rooms, found = list(self.recalled.values()), list[Tensor]()
        for key, room in self.recalled.items():
            kept = state.get(*key)
            if kept is None or kept.shape != room.shape:
                return False
            found.append(kept)
        torch._foreach_copy_(rooms, found)
        return True

    def play(self, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Do what `Exchange.start` does."""
        pending: Pending | None = None
        for graph, round_, tensor, out in self.sent:
            if pending is not None:
                pending.wait()
            graph.replay()
            pending = comm.issue(round_, tensor, out)
        running = pending

        def decode() -> None:
            if running is not None:
                running.wait()
            self.last.replay()
            for sound, complaint in self.told:
                ctx.see(sound, complaint)
            if self.kept:
                fresh = [torch.empty_like(each) for each in self.kept.values()]
                torch._foreach_copy_(fresh, list(self.kept.values()))
                for (kind, name), tensor in zip(self.kept, fresh, strict=True):
                    ctx.kept.put(kind, name, tensor)

        return decode


@dataclass
class _Uses:
    """Steps with the same addresses."""

    number: int = 0
    tape: _Tape | None = None


@dataclass(eq=False)
class CapturedExchange:
    """`exchange` of one unit, which is replayed once its addresses have come back, in steps that allow it."""

    exchange: Exchange
    captures: Captures
    label: str
    _known: dict[Hashable, _Uses] = field(default_factory=dict, init=False)
    _left: int = field(default=TRIES, init=False)
    """Tries that are left; with none this unit stays eager."""
    _turn: Callable[[ExchangeContext], Hashable] | None = field(init=False)

    def __post_init__(self) -> None:
        self._turn = getattr(self.exchange, "turn", None)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        if self.captures.are_allowed and self._left:
            key = x.data_ptr(), mean.data_ptr(), None if self._turn is None else self._turn(ctx)
            uses = self._known.get(key)
            if uses is None:
                if len(self._known) >= MOST:
                    self._known.clear()  # addresses that come back are captured again
                uses = self._known[key] = _Uses()
            uses.number += 1
            if uses.tape is None and uses.number > EAGER:
                uses.tape = self._recorded(x, mean, comm, ctx)
                uses.number = 0  # if it was too early, as many steps are eager again
            tape = uses.tape
            if tape is not None and (not tape.recalled or tape.recall(ctx.kept)):
                return tape.play(comm, ctx)
        return self.exchange.start(x, mean, comm, ctx)

    def _recorded(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> _Tape | None:
        """Capture the exchange, of which nothing runs and nothing is sent. `None` if that cannot be: if it
        never can, this unit stays eager.
        """
        recorder = _Recorder(comm, self.captures.graphs())
        told: list[tuple[Tensor, str]] = []
        captured = object.__new__(_CapturedContext)
        try:
            with holding() as tables, _uncollected():
                recorder.wait()
                kept = _Kept(ctx, x.device)
                captured.__dict__.update(ctx.__dict__, kept=kept, see=lambda *finding: told.append(finding))
                decode = self.exchange.start(x, mean, recorder, captured)
                decode()
                last = recorder.stop()
        except (TooEarly, RuntimeError) as error:
            recorder.give_up()
            self._left = self._left - 1 if isinstance(error, TooEarly) else 0
            if not self._left:
                self._known.clear()
                why = str(error) or f"in {TRIES} tries something that they read was not there yet"
                _LOG.warning(
                    "kernels of %s cannot be captured, and are launched one by one: %s", self.label, why
                )
            return None
        except BaseException:
            recorder.give_up()  # or all that follows in this stream would be recorded
            raise
        self._left = TRIES
        return _Tape(tuple(recorder.sent), last, tuple(told), kept.recalled, kept.left, (decode, tables))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within it no garbage is collected: it may have graphs and events, which a thread that captures must not
    free.
    """
    with _CAPTURES:  # one thread at a time, or one would let another's garbage be collected
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
