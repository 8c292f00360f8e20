"""The clock, and spans of what ran when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

now_s = time.perf_counter
"""Seconds of a monotonic clock."""

cpu_s = time.thread_time
"""CPU seconds of the calling thread."""

What = Literal["backward", "encode", "wire", "decode", "wait"]


@dataclass(frozen=True)
class Span:
    """Something that ran from `start_s` to `stop_s` on the clock of `now_s`."""

    what: What
    unit: str
    start_s: float
    stop_s: float


@dataclass
class RoundTime:
    """A collective of `payload_bytes` per rank, from its issue to its end as this rank saw them.

    `verb` is "verb/algorithm" where the library's own does not run.
    """

    verb: str
    payload_bytes: int
    start_s: float
    stop_s: float | None = None

    def ended(self, at_s: float) -> None:
        """Note the end; the first to notice is right."""
        self.stop_s = at_s if self.stop_s is None else self.stop_s

    @property
    def seconds(self) -> float:
        """How long it took; 0 while it is under way."""
        return 0.0 if self.stop_s is None else self.stop_s - self.start_s


@dataclass
class Trace:
    """The spans and rounds of one step, and the sums that are kept even when nobody looks."""

    rounds: list[RoundTime] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    compress_s: float = 0.0
    waited_s: float = 0.0

    def compressing(self, what: Literal["encode", "decode"], unit: str) -> _Compressing:
        """Time local work; seconds spent waiting for the wire inside it are not counted."""
        return _Compressing(self, what, unit)

    def add(self, what: What, unit: str, start_s: float, stop_s: float) -> None:
        """Note a span that was timed elsewhere."""
        self.spans.append(Span(what, unit, start_s, stop_s))


class _Compressing:
    """A class, because `contextlib` takes five times as long, and there are dozens of these in a step."""

    __slots__ = ("_start_s", "_trace", "_unit", "_waited_s", "_what")

    def __init__(self, trace: Trace, what: Literal["encode", "decode"], unit: str) -> None:
        self._trace, self._what, self._unit = trace, what, unit

    def __enter__(self) -> None:
        self._start_s, self._waited_s = now_s(), self._trace.waited_s

    def __exit__(self, *_: object) -> None:
        stop_s, trace = now_s(), self._trace
        trace.compress_s += stop_s - self._start_s - (trace.waited_s - self._waited_s)
        trace.spans.append(Span(self._what, self._unit, self._start_s, stop_s))
