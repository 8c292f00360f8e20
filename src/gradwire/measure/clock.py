"""Clocks: spans of a step, marks in a stream of work, and ready times of gradients.

Kernels run after the host has queued them, so the host's clock shows when a gradient was enqueued, not when
it was computed. On an accelerator, an event is therefore recorded in the computing stream, and read later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

now_s = time.perf_counter
"""Seconds of a monotonic clock."""

cpu_s = time.thread_time
"""CPU seconds of the calling thread."""

process_s = time.process_time
"""CPU seconds of all threads of this process."""

What = Literal["backward", "encode", "wire", "decode", "wait"]


@dataclass(frozen=True)
class Span:
    """A span of work, from `start_s` to `stop_s` on the clock `now_s`."""

    what: What
    unit: str
    start_s: float
    stop_s: float


@dataclass
class RoundTime:
    """Times of a collective of `payload_bytes` per rank, from its issue to its end on this rank.

    `verb` is "verb/algorithm" for an algorithm of gradwire's own.
    """

    verb: str
    payload_bytes: int
    start_s: float
    stop_s: float | None = None

    def ended(self, at_s: float) -> None:
        """Set the end to `at_s`, unless it is set already: the first observer is the most exact."""
        self.stop_s = at_s if self.stop_s is None else self.stop_s

    @property
    def seconds(self) -> float:
        """Duration in seconds; 0 while it is running."""
        return 0.0 if self.stop_s is None else self.stop_s - self.start_s


@dataclass
class Trace:
    """Spans and rounds of one step, and their sums in seconds, which exist for every step."""

    rounds: list[RoundTime] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    compress_s: float = 0.0
    waited_s: float = 0.0
    recipe: str | None = None
    """The name in the ranges of a profiler; `None` while no profiler runs."""
    exact: Callable[[], float] | None = None
    """The clock of rounds whose end is not announced; `None` if they go without times."""

    def compressing(self, what: Literal["encode", "decode"], unit: str) -> AbstractContextManager[Any]:
        """Time local work, less the seconds in which it waits for the wire."""
        return Compressing(self, what, unit)

    def add(self, what: What, unit: str, start_s: float, stop_s: float) -> None:
        """Note a span of work of kind `what` on `unit`, timed elsewhere: from `start_s` to `stop_s` on the
        clock of `now_s`.
        """
        self.spans.append(Span(what, unit, start_s, stop_s))


class Compressing:
    """Times local work of a trace.

    It is a class because `contextlib` takes five times as long, and a step has dozens of these.
    """

    __slots__ = ("_start_s", "_trace", "_unit", "_waited_s", "_what")

    def __init__(self, trace: Trace, what: Literal["encode", "decode"], unit: str) -> None:
        self._trace, self._what, self._unit = trace, what, unit

    def __enter__(self) -> None:
        self._start_s, self._waited_s = now_s(), self._trace.waited_s

    def __exit__(self, *_: object) -> None:
        stop_s, trace = now_s(), self._trace
        trace.compress_s += stop_s - self._start_s - (trace.waited_s - self._waited_s)
        trace.spans.append(Span(self._what, self._unit, self._start_s, stop_s))


class Stopwatch(Protocol):
    """Measures the time between two marks, whose type is the stopwatch's own."""

    def mark(self) -> Any:
        """A mark after the work that is queued so far. Does not wait."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds from one mark to another; may wait until the work in between is done."""


class HostStopwatch:
    """A stopwatch for work that is done when a call returns."""

    def mark(self) -> float:
        return now_s()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class EventStopwatch:
    """A stopwatch of events in the current stream, which computes when a gradient's hook runs.

    `new_event` makes an object with `synchronize` and `elapsed_time` (milliseconds), and `current` tells the
    stream, which records it: an event on its own goes to whichever device is the thread's.
    """

    def __init__(self, new_event: Callable[[], Any], current: Callable[[], Any]) -> None:
        self._new_event, self._current = new_event, current

    def mark(self) -> Any:
        event = self._new_event()
        self._current().record_event(event)
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


class Timed(Protocol):
    """The part of a device that a stopwatch needs."""

    @property
    def where(self) -> torch.device:
        """The device of its tensors."""

    @property
    def is_host(self) -> bool:
        """True if work is complete when a call returns."""

    def new_event(self) -> Any:
        """Make an event that takes times."""

    def current(self) -> Any:
        """The stream to which this thread's operators go."""


class _Host:
    where, is_host = torch.device("cpu"), True

    def new_event(self) -> Any:
        raise NotImplementedError("the host has clocks")

    current = new_event


HOST: Timed = _Host()
"""The CPU."""


def stopwatch_for(device: Timed) -> Stopwatch:
    """The stopwatch of the device that computes."""
    return HostStopwatch() if device.is_host else EventStopwatch(device.new_event, device.current)


def clock_of(device: Timed) -> Callable[[], float]:
    """A clock that waits for the work in the device's current stream; on the CPU, `now_s`."""
    if device.is_host:
        return now_s

    def clock() -> float:
        device.current().record_event().synchronize()
        return now_s()

    return clock


class BackwardWatch:
    """Times of a backward pass. The training thread writes them; the reducer reads them while that thread
    waits.

    A new pass discards the marks of the one before, so the last of several passes without synchronisation
    counts. Parameters are watched only between `watch` and `release`: a hook costs a microsecond.
    """

    def __init__(
        self,
        stopwatch: Stopwatch | None = None,
        clock: Callable[[], float] = now_s,
        exact: Callable[[], float] = now_s,
    ) -> None:
        """Watch by `clock`; the start of a pass is read from `exact`, which may wait for a device, while
        parameters are watched.
        """
        self._stopwatch, self._clock = stopwatch or HostStopwatch(), clock
        self.exact = exact
        self._begun_s: float | None = None
        self._ended_s: float | None = None
        self._begun: Any = None
        self._ready: dict[str, Any] = {}
        self._spent: tuple[tuple[float, float], tuple[float, float]] | None = None
        self._hooks: list[Any] = []

    def watch(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Start to mark when the gradient of each of the named `parameters` has been accumulated."""
        if not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._mark, name))  # type: ignore[no-untyped-call]
                for name, parameter in parameters
                if parameter.requires_grad
            ]

    def release(self) -> None:
        """Remove the hooks and discard their marks."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._ready = {}

    def _mark(self, name: str, _parameter: Tensor) -> None:
        self._ready[name] = self._stopwatch.mark()
        if self._spent is not None:
            self._spent = self._spent[0], (now_s(), process_s())

    def begin(self, _gradient: Tensor | None = None) -> None:
        """Mark the beginning of a backward pass; the last call before `end` counts."""
        self._begun_s = self.exact() if self._hooks else self._clock()
        self._begun = self._stopwatch.mark()
        self._ready = {}
        self._spent = 2 * ((now_s(), process_s()),) if self._hooks else None

    def end(self) -> None:
        """Mark the end of the backward pass and of everything that it had to wait for."""
        self._ended_s = self._clock()

    def mark_end(self) -> Callable[[], float] | None:
        """Mark the end of this pass in the current stream. `None` if no beginning is marked.

        Returns a function that gives the seconds since the beginning. It may wait for the device.
        """
        if self._begun is None:
            return None
        return partial(self._stopwatch.seconds, self._begun, self._stopwatch.mark())

    def take_begun_s(self) -> float:
        """Return the start time of this pass and forget it; the present time if there is no mark (under
        `join()`).
        """
        begun_s, self._begun_s = self._begun_s, None
        if begun_s is None:
            self._begun = None
            return self._clock()
        return begun_s

    def before_s(self, begun_s: float) -> float:
        """Seconds from the end of the pass before to `begun_s`; 0 in the first step."""
        return max(begun_s - self._ended_s, 0.0) if self._ended_s is not None else 0.0

    def busy(self) -> float:
        """Mean number of cores that this process kept busy between the start of this pass and its last mark.

        0 if parameters are not watched.
        """
        if self._spent is None:
            return 0.0
        (begun_s, before_s), (ended_s, after_s) = self._spent
        return (after_s - before_s) / (ended_s - begun_s) if ended_s > begun_s else 0.0

    def spent_since_s(self) -> float:
        """CPU seconds of this process since this pass's last mark; 0 where parameters are not watched."""
        return 0.0 if self._spent is None else process_s() - self._spent[1][1]

    def ready_s(self) -> dict[str, float]:
        """Seconds from the beginning of this pass until each watched gradient was ready, by name."""
        if self._begun is None:
            return {}
        return {name: self._stopwatch.seconds(self._begun, mark) for name, mark in list(self._ready.items())}
