"""The one thread that issues collectives, so that their order is the program's on every rank."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from gradwire.errors import GradwireError, TransportError
from gradwire.measure.clock import now_s
from gradwire.placement import Waited

T = TypeVar("T")
Job = Callable[[], None]
WAITS = "gradwire waits"
"""The name of the thread that waits for a device."""
AWAKE_S = 0.5
"""Seconds between checks, by a waiting thread, that the worker is alive."""


class Worker:
    """Runs jobs in the order in which they were posted, from any thread, on a thread of its own."""

    def __init__(
        self,
        crashed: Callable[[BaseException], None],
        ended: Job = lambda: None,
        begun: Job = lambda: None,
        awake_s: float = AWAKE_S,
        name: str = "gradwire",
    ) -> None:
        """Start the thread.

        Args:
            crashed: takes the error that a job raises.
            ended: runs last on the thread.
            begun: runs first on the thread.
            awake_s: seconds between two checks of a thread that waits.
            name: name of the thread.
        """
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._begun = begun
        self._waiter: Worker | None = None
        self.crashed, self._ended, self._awake_s = crashed, ended, awake_s
        """Takes the error that a job raises."""
        self.is_connected = True
        """True until a `call` breaks the transport."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.post(begun)
        self._thread.start()

    def post(self, job: Job) -> None:
        """Queue `job`; returns at once."""
        self._jobs.put(job)

    def post_after(self, ready: Job, job: Callable[[Waited], None]) -> None:
        """Queue `job` once `ready` has returned, which may block, in the order of these calls and of `call`.

        Another thread waits, so that the worker does other jobs meanwhile.
        """
        if self._waiter is None:
            self._waiter = Worker(
                lambda error: self.post(lambda: self.crashed(error)), begun=self._begun, name=WAITS
            )

        def post() -> None:
            waited = wait_until(ready)
            self.post(lambda: job(waited))

        self._waiter.post(post)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the worker and return its result, or raise its exception.

        Raises `GradwireError` once the thread has ended, as it does with the interpreter.
        """
        future: Future[T] = Future()
        held = [function]  # dropped before there is an answer, after which the caller may drop the model
        done = threading.Event()
        future.add_done_callback(lambda _future: done.set())

        def job() -> None:
            try:
                future.set_result(held.pop()())
            except BaseException as error:
                self.is_connected &= not isinstance(error, TransportError)
                future.set_exception(error)

        if self._waiter is None:
            self.post(job)
        else:
            self._waiter.post(lambda: self.post(job))
        self.wait(done)
        return future.result()

    def wait(self, event: threading.Event, look: Job = lambda: None) -> None:
        """Block until the worker has set `event`; raises `GradwireError` if its thread has ended.

        Meanwhile `look` is called every `awake_s`; it ends the wait by raising.
        """

        def awake() -> None:
            if not self._thread.is_alive() and not event.is_set():
                raise GradwireError("gradwire's thread has ended: nothing can be asked of it any more")
            look()

        wait_for(event, awake, self._awake_s)

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread once the jobs queued so far are done, and `ended`, and wait for that. Idempotent.

        A thread that comes back from native code while the interpreter shuts down aborts the process,
        hence the wait; a job that hangs in a broken transport outlasts it.
        """
        ours = [self._thread]
        if self._waiter is None:
            self._jobs.put(None)
        else:
            ours.append(self._waiter._thread)
            self._waiter.post(lambda: self._jobs.put(None))
            self._waiter.stop(timeout_s)
        if threading.current_thread() not in ours:  # the garbage collector runs anywhere
            self._thread.join(timeout_s)

    def stop_after(self, event: threading.Event) -> None:
        """Call `stop` once a job has set `event`, or when the interpreter exits. Returns at once."""

        def wait() -> None:
            event.wait()
            atexit.unregister(self.stop)
            self.stop()

        atexit.register(self.stop)
        threading.Thread(target=wait, name=f"{self._thread.name} ends", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # `SystemExit`, too, which would end this thread in silence
                self.crashed(error)
            del job  # or what it holds would stay until the next
        self._ended()


def wait_until(ready: Job) -> Waited:
    """Call `ready`, which may block. Returns the time of its end, and its error."""
    error: BaseException | None = None
    try:
        ready()
    except BaseException as raised:
        error = raised
    return Waited(now_s(), error)


def wait_for(
    event: threading.Event, look: Callable[[], None] = lambda: None, awake_s: float = AWAKE_S
) -> None:
    """Wait for `event` without a limit, but wake up for signals.

    Python acts on Ctrl-C between two instructions. One that arrives just before an endless wait is noted and
    has no effect until that ends, which may be the timeout of a process group.

    Args:
        event: ends the wait.
        look: called at each wake-up; ends the wait by raising.
        awake_s: seconds between two wake-ups.
    """
    while not event.wait(awake_s):
        look()
