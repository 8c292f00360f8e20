"""Helper thread of a rank, which completes messages and multi-hop collectives while the caller goes on.

In a multi-hop collective, every rank has to add and to send on. `wait` cannot do that: one rank may issue
further collectives before it waits and another may not, and each would wait for the other. `issue` cannot do
it either, because nothing would overlap with the wire. So one thread per rank runs collectives in the order
in which they were issued, which is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from gradwire.errors import TransportError

Job = Callable[[], None]
_Jobs = queue.SimpleQueue["tuple[Job, Promise] | None"]

STOP_S = 2.0
"""The end of the program waits this long for a thread that hangs in a broken transport."""


class Promise:
    """A job that is queued or running; implements `gradwire.comm.Pending`.

    Not a `concurrent.futures.Future`, because that keeps its callbacks. They would form a reference cycle
    that keeps a step's tensors alive until the garbage collector runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._callbacks: list[Job] = []
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the job is done; raises its exception."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def then(self, callback: Job) -> None:
        """Call back when the job has ended or failed, on the thread that ran it; at once if it already
        has.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def resolve(self, error: BaseException | None = None) -> None:
        """Mark the job as ended, with `error` if it failed, and call back."""
        with self._lock:
            self._error = error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Progress:
    """The thread. After a job has raised, the order of hops is lost, so all later jobs raise at once."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="gradwire messages", daemon=True)
        thread.start()
        # A thread that comes back from native code while the interpreter shuts down aborts the process.
        self.stop = weakref.finalize(self, _end, self._jobs, thread)

    def issue(self, job: Job) -> Promise:
        """Run `job` after all jobs issued before it; returns at once."""
        promise = Promise()
        self._jobs.put((job, promise))
        return promise


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:  # the garbage collector may run on any thread
        thread.join(STOP_S)


def _serve(jobs: _Jobs) -> None:
    broken: BaseException | None = None
    while (task := jobs.get()) is not None:
        job, promise = task
        broken = _attempt(job, promise, broken)
        del task, job, promise  # or the tensors would stay until the next job


def _attempt(job: Job, promise: Promise, broken: BaseException | None) -> BaseException | None:
    """Run `job` and keep its `promise`; it fails at once if an earlier job has `broken` the order. Returns
    the error after which no further job can run, or `None`.
    """
    try:
        if broken is not None:
            raise TransportError(f"an earlier collective has failed: {broken}")
        job()
    except BaseException as error:
        promise.resolve(error)
        return broken or error
    promise.resolve()
    return None
