"""Signals that come before there is a handler."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from gradwire.lab.emulate import sandbox
from gradwire.lab.emulate.sandbox import minds


@pytest.fixture
def handlers() -> Iterator[None]:
    """As they were."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def terminate_this_process() -> None:
    """By a signal that comes after a handler is set: before, it would end the tests."""
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()


def test_who_has_a_handler_is_told_from_who_has_not_and_who_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        try:
            assert minds(os.getpid(), signal.SIGINT)
            assert not minds(os.getpid(), signal.SIGUSR2)
            assert not minds(sleeping.pid, signal.SIGTERM)
        finally:
            sleeping.kill()
        sleeping.wait()
        assert not minds(sleeping.pid, signal.SIGTERM)


def test_who_ignores_a_signal_minds_it() -> None:
    with subprocess.Popen(["sh", "-c", "trap '' HUP; echo; exec sleep 60"], stdout=subprocess.PIPE) as deaf:
        try:
            assert deaf.stdout is not None
            deaf.stdout.readline()
            assert minds(deaf.pid, signal.SIGHUP)
        finally:
            deaf.kill()


@pytest.mark.usefixtures("handlers")
def test_a_signal_before_anybody_listens_ends_the_sandbox_at_once() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60; true"])
    inner = None
    while inner is None:
        inner = sandbox._only_child(child.pid)
    try:
        terminate_this_process()
        assert sandbox._wait_and_forward(child) == 128 + signal.SIGTERM
        os.kill(inner, 0)  # it has not been asked, because it would not have noticed
    finally:
        os.kill(inner, signal.SIGKILL)
        child.kill()
        child.wait()


@pytest.mark.usefixtures("handlers")
def test_who_dies_of_something_else_after_a_signal_says_so() -> None:
    listening = "trap exit TERM; while :; do sleep 0.05; done"
    child = subprocess.Popen(["sh", "-c", 'sh -c "$0"; kill -USR1 $$', listening])
    try:
        while (inner := sandbox._only_child(child.pid)) is None or not minds(inner, signal.SIGTERM):
            pass
        terminate_this_process()
        assert sandbox._wait_and_forward(child) == 128 + signal.SIGUSR1
    finally:
        child.kill()
        child.wait()
