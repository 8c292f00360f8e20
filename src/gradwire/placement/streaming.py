"""Gradients, memory, codecs and bytes on a device: for a transport whose collectives are work in a stream.

The thread that brings gradients enqueues all of it, and the host waits for none. Collectives of several
communicators must be issued in one order on all ranks, most safely by one thread (NCCL's user guide, "Using
multiple NCCL communicators concurrently"): the one that computes has collectives of its own to issue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gradwire.comm.base import Comm, Pending, Round


class StreamComm(Comm):
    """`Comm` over one whose collectives are enqueued: waiting for one puts the current stream after it.

    The host is not told of its end, so `then` calls back at once: what the callback enqueues comes after the
    collective, once it has waited. No time can be read from the end either.

    Sums and broadcasts go as the library likes: hops of our own are messages, for which the host waits.
    """

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Enqueue the collective by the library's own algorithm; the host does not wait."""
        return _Enqueued(self._comm.issue(replace(round_, algorithm="library"), tensor, out))


class _Enqueued:
    def __init__(self, inner: Pending) -> None:
        self.wait = inner.wait

    def then(self, callback: Callable[[], None]) -> None:
        callback()


class Inline:
    """A `Post` that runs jobs on the calling thread: one after the other, none within another.

    >>> post, order = Inline(), []
    >>> post(lambda: [order.append(1), post(lambda: order.append(3)), order.append(2)])
    >>> order
    [1, 2, 3]
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False

    def __call__(self, job: Callable[[], None]) -> None:
        """Run `job`, or leave it to the call that is running one; raises what it raises."""
        self._jobs.append(job)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._jobs:
                self._jobs.popleft()()
        finally:
            self._is_running = False
