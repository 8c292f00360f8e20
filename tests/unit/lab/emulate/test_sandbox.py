"""Signals that come before there is a handler."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire_lab.emulate import sandbox
from gradwire_lab.emulate.sandbox import minds


@pytest.fixture
def handlers() -> Iterator[None]:
    """As they were."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


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


Enter = Callable[[str, Callable[[], None]], int]


@pytest.fixture
def enter(handlers: None, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Enters a sandbox that is a shell without a namespace; returns the exit code.

    `meanwhile` runs on another thread, once there is a handler: before, a signal would end the tests.
    """

    def entered(script: str, meanwhile: Callable[[], None]) -> int:
        monkeypatch.delenv(sandbox.INSIDE, raising=False)
        monkeypatch.setattr(sandbox, "choose", lambda _mode: "root")
        monkeypatch.setattr(sandbox, "sandbox_command", lambda _mode: ["sh", "-c", script])
        before = signal.getsignal(signal.SIGTERM)

        def handled() -> None:
            while signal.getsignal(signal.SIGTERM) is before:
                time.sleep(0.01)
            meanwhile()

        thread = threading.Thread(target=handled, daemon=True)
        thread.start()
        with pytest.raises(SystemExit) as ended:
            sandbox.enter()
        thread.join()
        code = ended.value.code
        assert isinstance(code, int)
        return code

    return entered


def inside(numbers: Path) -> int:
    """The process in the sandbox, once it runs."""
    while not (numbers.exists() and numbers.read_text().endswith("\n")):
        time.sleep(0.01)
    return int(numbers.read_text())


def test_a_signal_before_anybody_listens_ends_the_sandbox_at_once(enter: Enter, tmp_path: Path) -> None:
    numbers = tmp_path / "inside"

    def meanwhile() -> None:
        inside(numbers)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        code = enter(f"sleep 60 & echo $! > {numbers}; wait", meanwhile)
        assert code == 128 + signal.SIGTERM
        os.kill(inside(numbers), 0)  # it has not been asked, because it would not have noticed
    finally:
        os.kill(inside(numbers), signal.SIGKILL)


def test_who_dies_of_something_else_after_a_signal_says_so(enter: Enter, tmp_path: Path) -> None:
    numbers = tmp_path / "inside"
    listening = "trap exit TERM; while :; do sleep 0.05; done"

    def meanwhile() -> None:
        while not minds(inside(numbers), signal.SIGTERM):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    script = f"sh -c '{listening}' & echo $! > {numbers}; wait; kill -USR1 $$"
    assert enter(script, meanwhile) == 128 + signal.SIGUSR1


def test_who_hears_a_signal_and_does_not_end_is_ended_after_a_while(
    enter: Enter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = tmp_path / "inside"
    monkeypatch.setattr(sandbox, "PATIENCE_S", 0.1)

    def meanwhile() -> None:
        while not minds(inside(numbers), signal.SIGTERM):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    deaf = 'trap "" TERM; while :; do sleep 0.05; done'
    try:
        assert enter(f"sh -c '{deaf}' & echo $! > {numbers}; wait", meanwhile) == 128 + signal.SIGTERM
    finally:
        os.kill(inside(numbers), signal.SIGKILL)


def test_signals_that_are_ignored_stay_ignored(enter: Enter) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert enter("exit 3", lambda: None) == 3
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
