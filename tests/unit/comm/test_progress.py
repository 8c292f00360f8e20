"""Hops run beside the caller, in order, and stop for good when one has failed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest

from gradwire.comm.progress import Progress
from gradwire.errors import TransportError


def test_jobs_run_in_order_beside_the_caller() -> None:
    progress, gate, done = Progress(), threading.Event(), []
    first = progress.issue(lambda: (gate.wait(5), done.append("first"))[1])
    second = progress.issue(lambda: done.append("second"))
    assert done == []  # the caller goes on
    gate.set()
    second.wait()
    first.wait()
    first.wait()  # twice is once
    assert done == ["first", "second"]


def test_callback_comes_once_when_the_job_has_ended_well_or_badly() -> None:
    progress, called = Progress(), []

    def fail() -> None:
        raise TransportError("torn")

    for job in (lambda: None, fail):
        ended = threading.Event()
        pending = progress.issue(job)
        pending.then(lambda ended=ended: (called.append(True), ended.set())[0])
        assert ended.wait(5)
    assert len(called) == 2


def test_error_is_raised_by_wait_and_by_all_that_follow() -> None:
    progress, ran = Progress(), []

    def fail() -> None:
        raise TransportError("torn")

    failing, later = progress.issue(fail), progress.issue(lambda: ran.append(True))
    with pytest.raises(TransportError, match="torn"):
        failing.wait()
    with pytest.raises(TransportError, match="an earlier collective has failed: torn"):
        later.wait()
    with pytest.raises(TransportError, match="earlier"):
        progress.issue(lambda: ran.append(True)).wait()
    assert ran == []


def test_what_would_end_a_thread_is_raised_by_wait_and_ends_no_thread() -> None:
    progress = Progress()
    with pytest.raises(SystemExit, match="3"):
        progress.issue(lambda: sys.exit(3)).wait()
    with pytest.raises(TransportError, match="earlier collective has failed: 3"):
        progress.issue(lambda: None).wait()


def test_what_has_ended_is_freed_without_the_garbage_collector() -> None:
    class Step:
        promise: object

    progress, step, called = Progress(), Step(), threading.Event()
    gone = weakref.ref(step)
    gate = threading.Event()
    step.promise = promise = progress.issue(lambda: (gate.wait(5), None)[1])
    promise.then(lambda step=step: called.set())
    gc.disable()
    try:
        gate.set()
        promise.wait()
        assert called.wait(5)
        progress.issue(lambda: None).wait()  # by now the thread has let go of the first job
        del step, promise
        assert gone() is None
    finally:
        gc.enable()


def test_thread_ends_with_its_owner() -> None:
    progress = Progress()
    progress.issue(lambda: None).wait()
    before = {thread.ident for thread in threading.enumerate() if thread.name == "gradwire messages"}
    stop = progress.stop
    del progress
    gc.collect()
    assert not stop.alive
    after = {thread.ident for thread in threading.enumerate() if thread.name == "gradwire messages"}
    assert after < before
