"""Signals that come before anybody listens."""

from __future__ import annotations

import os
import signal
import subprocess

from gradwire.emulate.sandbox import catches


def test_who_has_a_handler_is_told_from_who_has_not_and_who_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        assert catches(os.getpid(), signal.SIGINT)
        assert not catches(os.getpid(), signal.SIGUSR2)
        assert not catches(sleeping.pid, signal.SIGINT)
        sleeping.kill()
        sleeping.wait()
        assert not catches(sleeping.pid, signal.SIGINT)
