"""The reducer's jobs run on the thread that brings gradients, for transports whose collectives are work in a
stream.

That thread enqueues all jobs, and the host waits for none. Collectives of several communicators must be
issued in one order on all ranks, most safely by one thread (NCCL's user guide, "Using multiple NCCL
communicators concurrently"): the thread that computes has collectives of its own to issue.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

_AWAKE_S = 0.5


class Inline:
    """`Post` that runs jobs on the calling thread, `within` a context, one after the other and never nested.

    Other threads hand in jobs by `later`, which run on the thread that waits. `crashed` takes a job's
    exception; without it the calling thread raises it.

    >>> post, order = Inline(), []
    >>> post(lambda: [order.append(1), post(lambda: order.append(3)), order.append(2)])
    >>> order
    [1, 2, 3]
    """

    def __init__(
        self,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        crashed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._within, self._crashed = within, crashed
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._later: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def __call__(self, job: Callable[[], None]) -> None:
        """Run `job`, or leave it to the call that is running one."""
        self._jobs.append(job)
        if self._is_running:
            return
        self._is_running = True
        try:
            with self._within():
                while self._jobs:
                    try:
                        self._jobs.popleft()()
                    except BaseException as error:
                        if self._crashed is None:
                            raise
                        self._crashed(error)
        finally:
            self._is_running = False

    def later(self, job: Callable[[], None]) -> None:
        """Leave `job` to the thread that waits, or will; from any thread."""
        self._later.put(job)

    def wait(self, event: threading.Event, look: Callable[[], None] = lambda: None) -> None:
        """Run the remaining jobs until `event` is set; see `gradwire.placement.base.Wait`."""
        while not event.is_set():
            try:
                job = self._later.get(timeout=_AWAKE_S)
            except queue.Empty:
                look()
            else:
                self(job)
