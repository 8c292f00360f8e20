"""The one ordered thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from gradwire.errors import GradwireError, TransportError
from gradwire.step.worker import Worker


def _worker() -> tuple[Worker, list[BaseException]]:
    crashes: list[BaseException] = []
    return Worker(crashed=crashes.append, awake_s=0.001), crashes


def test_jobs_run_in_the_order_in_which_they_were_posted() -> None:
    worker, _ = _worker()
    seen: list[int] = []
    for number in range(100):
        worker.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    worker.stop()
    assert seen == list(range(100))


def test_call_runs_on_the_worker_after_what_was_posted_and_returns() -> None:
    worker, _ = _worker()
    seen: list[str] = []
    worker.post(lambda: seen.append("posted"))
    assert worker.call(lambda: (list(seen), threading.current_thread().name)) == (["posted"], "gradwire")
    worker.stop()


def test_what_waits_holds_up_what_comes_after_it_and_nothing_else() -> None:
    worker, _ = _worker()
    there, seen, both = threading.Event(), list[str](), threading.Event()

    def ready() -> None:
        there.wait()
        raise KeyError("the job hears of it")

    worker.post_after(ready, lambda waited: seen.append(f"waited for, {type(waited.error).__name__}"))
    worker.post_after(lambda: None, lambda waited: (seen.append(f"after it, {waited.error}"), both.set()))
    worker.post(lambda: (seen.append("meanwhile"), there.set()))
    assert both.wait(10.0)
    assert worker.call(lambda: list(seen)) == ["meanwhile", "waited for, KeyError", "after it, None"]
    later = threading.Event()
    worker.post_after(lambda: later.wait() and None, lambda _: seen.append("before the call"))
    threading.Timer(0.05, later.set).start()
    assert worker.call(lambda: seen[-1]) == "before the call"
    worker.stop()


def test_what_is_still_waited_for_is_done_before_the_end() -> None:
    seen, later = list[str](), threading.Event()
    worker = Worker(crashed=lambda _error: None, ended=lambda: seen.append("ended"))
    worker.post_after(lambda: later.wait() and None, lambda _: seen.append("waited for"))
    threading.Timer(0.05, later.set).start()
    worker.stop()
    worker.stop()
    assert seen == ["waited for", "ended"]


def test_call_raises_what_the_function_raised_and_the_worker_goes_on() -> None:
    worker, crashes = _worker()

    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        worker.call(fail)
    assert worker.call(lambda: 5) == 5
    assert crashes == []
    worker.stop()


@pytest.mark.parametrize("job", [lambda: 1 // 0, sys.exit])
def test_an_error_in_a_posted_job_is_reported_and_the_worker_goes_on(job: Callable[[], None]) -> None:
    worker, crashes = _worker()
    worker.post(job)
    assert worker.call(lambda: 5) == 5
    assert [type(error) for error in crashes] == [SystemExit if job is sys.exit else ZeroDivisionError]
    worker.stop()


def test_whoever_asks_a_thread_that_has_ended_does_not_wait_for_ever() -> None:
    worker, _ = _worker()
    worker.stop()
    with pytest.raises(GradwireError, match="has ended"):
        worker.call(lambda: 5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_for_a_thread_that_ends_instead_does_not_wait_for_ever() -> None:
    def crash(error: BaseException) -> None:
        raise error

    worker, never = Worker(crashed=crash, awake_s=0.001), threading.Event()
    worker.post(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(GradwireError, match="has ended"):
        worker.wait(never)
    never.set()
    worker.wait(never)  # what has happened is no error


def test_stopping_twice_is_stopping_once() -> None:
    worker, _ = _worker()
    worker.stop()
    worker.stop()


class Model:
    """Something that is asked for its state."""

    def state(self) -> int:
        return 5


def test_a_call_that_was_answered_keeps_nothing_of_what_it_asked() -> None:
    worker, _ = _worker()
    model = Model()
    gone = weakref.ref(model)
    assert worker.call(model.state) == 5
    del model
    assert gone() is None
    worker.stop()


def test_the_last_thing_it_does_comes_after_all_jobs() -> None:
    seen: list[str] = []
    worker = Worker(crashed=lambda _error: None, ended=lambda: seen.append("ended"))
    worker.post(lambda: seen.append("job"))
    worker.stop()
    worker.stop()
    assert seen == ["job", "ended"]


@pytest.mark.parametrize(("error", "connected"), [(ValueError("no"), True), (TransportError("torn"), False)])
def test_a_call_that_breaks_the_transport_is_remembered(error: Exception, connected: bool) -> None:
    worker, _ = _worker()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        worker.call(fail)
    assert worker.call(lambda: 5) == 5
    assert worker.is_connected == connected
    worker.stop()


def test_a_worker_that_is_to_stop_after_an_event_does_jobs_until_then() -> None:
    seen, event, over = list[str](), threading.Event(), threading.Event()
    worker = Worker(crashed=lambda _error: None, ended=over.set)
    worker.stop_after(event)
    assert worker.call(lambda: seen.append("job")) is None
    assert not over.is_set()
    worker.post(event.set)
    assert over.wait(10.0)
    assert seen == ["job"]


_NEVER_SET = """
import threading
from gradwire.step.worker import Worker

Worker(crashed=print, ended=lambda: print("ended")).stop_after(threading.Event())
"""


def test_an_event_that_never_comes_does_not_keep_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", _NEVER_SET], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
