"""Graphs: kernels that a device has recorded, and launches again as one.

What is recorded are launches with all that they were handed: addresses of tensors, and numbers. Recorded work
does not run; a replay runs it, with what lies at these addresses by then.
"""

from __future__ import annotations

from typing import Protocol


class Graph(Protocol):
    """A recording of kernels in the current stream."""

    def begin(self) -> None:
        """Record what this thread launches from now on, which does not run. Memory that it allocates stays
        the graph's as long as tensors in it live; what is let go of is used again by graphs that are captured
        later.

        What makes the host wait, or cannot be recorded for another reason, raises `RuntimeError`.
        """

    def end(self) -> None:
        """Record no more. Raises `RuntimeError` if something could not be recorded."""

    def replay(self) -> None:
        """Enqueue what was recorded in the current stream."""


class Graphs(Protocol):
    """Makes graphs that share memory. So they are captured and replayed in one stream, one by one."""

    def __call__(self) -> Graph:
        """One that is yet to be captured."""

    def memory_bytes(self) -> int:
        """Bytes that the graphs have taken from the device, for themselves alone."""
