"""Tests that pytest collects, as checks of a part."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from tests.gpu.outcomes import Outcome, Tell
from tests.support.where import WHERE


class Listener:
    """Tells each test once: where it failed or was skipped, or else that it passed."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for set-up, call and tear-down."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._tell(Outcome(report.nodeid, "skipped", reason.removeprefix("Skipped: ")))
        elif report.failed:
            self._tell(Outcome(report.nodeid, "failed", _last_line(report.longreprtext)))
        elif report.when == "call":
            self._tell(Outcome(report.nodeid, "passed"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, or is skipped as a whole."""
        if report.failed:
            self._tell(Outcome(report.nodeid, "failed", _last_line(report.longreprtext)))
        elif report.skipped:
            self._tell(Outcome(report.nodeid, "skipped", str(report.longrepr)))


def _last_line(text: str) -> str:
    """The error of a traceback: pytest begins its lines with E."""
    said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (said or text.splitlines() or ["no traceback"])[0]


def run_tests(tell: Tell, paths: Sequence[str], match: str | None = None, workers: int = 4) -> None:
    """Run the tests of `paths`, on several workers where there is a device and pytest-xdist."""
    arguments: list[Any] = ["-q", "-p", "no:cacheprovider", "--tb=short", *paths]
    arguments += ["-W", "default"]  # of other versions of torch than the development environment's
    arguments += ["-k", match] if match else []
    if WHERE.type != "cpu" and workers > 1 and find_spec("xdist") is not None:
        arguments += ["-n", str(workers), "--dist", "load"]
    code = pytest.main(arguments, plugins=[Listener(tell)])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        tell(Outcome(" ".join(paths), "failed", f"no test is found by {match!r}"))
    elif code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        tell(Outcome(" ".join(paths), "failed", f"pytest ended with {code}"))
