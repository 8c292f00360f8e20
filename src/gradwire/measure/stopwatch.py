"""Marks in a stream of work, and the seconds between them: on the host a clock, on CUDA events.

Kernels run after the host has queued them, so a host's clock sees when a gradient was ordered, not when it
was there. An event is recorded in the stream that computes it and read later, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from gradwire.measure.clock import now_s


class Stopwatch(Protocol):
    """Two marks make a duration; what a mark is, is the stopwatch's business."""

    def mark(self) -> Any:
        """Now, in the work queued so far. Does not wait."""

    def seconds(self, start: Any, stop: Any) -> float:
        """From one mark to another; may wait until the work in between is done."""


class HostStopwatch:
    """For work that is done when a call returns."""

    def mark(self) -> float:
        """See `Stopwatch.mark`."""
        return now_s()

    def seconds(self, start: float, stop: float) -> float:
        """See `Stopwatch.seconds`."""
        return stop - start


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaStopwatch:
    """Events in the current stream, which is the one that computes when a gradient's hook runs.

    `new_event` makes an object with `record`, `synchronize` and `elapsed_time` (milliseconds).
    """

    def __init__(self, new_event: Callable[[], Any] = _timing_event) -> None:
        self._new_event = new_event

    def mark(self) -> Any:
        """See `Stopwatch.mark`."""
        event = self._new_event()
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """See `Stopwatch.seconds`."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch of the device that computes."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
