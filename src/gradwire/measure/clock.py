"""The clock, and spans of what ran when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A collective of `payload_bytes` per rank, from its issue to its end as this rank saw them."""

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

    @contextmanager
    def compressing(self, what: Literal["encode", "decode"], unit: str) -> Iterator[None]:
        """Time local work; seconds spent waiting for the wire inside it are not counted."""
        start_s, waited_s = now_s(), self.waited_s
        try:
            yield
        finally:
            stop_s = now_s()
            self.compress_s += stop_s - start_s - (self.waited_s - waited_s)
            self.spans.append(Span(what, unit, start_s, stop_s))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for the wire."""
        start_s = now_s()
        try:
            yield
        finally:
            self.waited_s += now_s() - start_s

    def add(self, what: What, unit: str, start_s: float, stop_s: float) -> None:
        """Note a span that was timed elsewhere."""
        self.spans.append(Span(what, unit, start_s, stop_s))
