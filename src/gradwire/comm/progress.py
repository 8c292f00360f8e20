"""Messages, and several hops in a row, without anybody who waits for them: a thread that drives them.

Hops need somebody on every rank who adds and sends on. It cannot be whoever calls `wait`: one rank may have
issued further collectives before it waits, another not, and each would wait for the other. It cannot be
`issue` either, for then nothing would overlap with the wire. So there is one thread per rank that takes
one collective after the other, in the order in which they were issued, which is the same on all ranks.
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
"""So long the end of the program waits for a thread that hangs in a broken transport."""


class Promise:
    """A job that is going to be done; see `gradwire.comm.Pending`.

    Not a `concurrent.futures.Future`, which keeps its callbacks: with what they refer to they would be a
    cycle, and a step's tensors would stay until the garbage collector runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._callbacks: list[Job] = []
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the job is done; raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def then(self, callback: Job) -> None:
        """Call back when the job has ended well or badly, on the thread that did it."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def settle(self, error: BaseException | None = None) -> None:
        """The job has ended, with `error` if badly."""
        with self._lock:
            self._error = error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Progress:
    """The thread. After a job that raised, the order of hops is lost, and all later ones raise at once."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="gradwire messages", daemon=True)
        thread.start()
        # A thread that comes back from native code while the interpreter shuts down aborts the process.
        self.stop = weakref.finalize(self, _end, self._jobs, thread)

    def issue(self, job: Job) -> Promise:
        """Do `job` after all that were issued before; returns at once."""
        promise = Promise()
        self._jobs.put((job, promise))
        return promise


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:  # the garbage collector runs anywhere
        thread.join(STOP_S)


def _serve(jobs: _Jobs) -> None:
    broken: BaseException | None = None
    while (task := jobs.get()) is not None:
        job, promise = task
        broken = _attempt(job, promise, broken)
        del task, job, promise  # or the tensors would stay until the next job


def _attempt(job: Job, promise: Promise, broken: BaseException | None) -> BaseException | None:
    """Do `job` and return None, or why nothing more can be done."""
    try:
        if broken is not None:
            raise TransportError(f"an earlier collective has failed: {broken}")
        job()
    except BaseException as error:
        promise.settle(error)
        return broken or error
    promise.settle()
    return None
