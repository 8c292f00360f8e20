"""Graphs: kernels that a device has recorded, and launches again as one.

What is recorded are launches with all that they were handed: addresses of tensors, and numbers. Recorded work
does not run; a replay runs it, with what lies at these addresses by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Graph(Protocol):
    """A recording of kernels in the current stream."""

    def capture(self, work: Callable[[], None]) -> None:
        """Record what `work` launches, which does not run. Memory that it allocates stays the graph's as long
        as tensors in it live; what is let go of is used again by graphs that are captured later.

        Raises `RuntimeError` if `work` makes the host wait, or does something else that cannot be recorded.
        Nothing has run then.
        """

    def replay(self) -> None:
        """Enqueue what was recorded in the current stream."""


Graphs = Callable[[], Graph]
"""Makes graphs that share memory. So they are captured and replayed in one stream, one after the other."""
