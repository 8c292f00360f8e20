"""Graphs: kernels that a device has recorded, and launches again as one.

What is recorded are launches with all that they were handed: addresses of tensors, and numbers. Recorded work
does not run; a replay runs it, with what lies at these addresses by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Graph(Protocol):
    """A recording of kernels in the current stream."""

    def begin(self) -> None:
        """Record what this thread launches from now on, which does not run. Memory that it allocates stays
        the graph's as long as tensors in it live; what is let go of is used again by what is captured later
        in the same memory.

        What makes the host wait, or cannot be recorded for another reason, raises `RuntimeError`.
        """

    def end(self) -> None:
        """Record no more. Raises `RuntimeError` if something could not be recorded."""

    def replay(self) -> None:
        """Enqueue what was recorded in the current stream."""


class Graphs(Protocol):
    """Makes graphs. They are captured and replayed in one stream."""

    def __call__(self) -> Callable[[], Graph]:
        """A maker of graphs that share memory, which no others share. They are replayed in the order in which
        they were captured, from the first to the last: what one has let go of, a later one may have taken.
        """

    def memory_bytes(self) -> int:
        """Bytes that the graphs that are left have taken from the device, for themselves alone."""
