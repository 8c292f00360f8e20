"""A plugin of pytest for an instrumented copy: says which test runs now, and writes what tests took.

A fixture that serves several tests is a time of its own. So each of these tests has what it entered, and not
only the first one.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = "GRADWIRE_TEETH_FOLDER"


class Recorder:
    """Times are numbered from 1; 0 is that of imports and of collection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "now").open("r+b") as file:
            self._now = memoryview(mmap.mmap(file.fileno(), 4)).cast("i")
        self._times = 0
        self._shared: dict[object, int] = {}
        self._seconds: dict[int, float] = {}
        self._items: list[dict[str, Any]] = []
        self._passed = True
        self._called = False

    @contextmanager
    def _time(self) -> Generator[int]:
        before, started_s = self._now[0], time.monotonic()
        self._times += 1
        self._now[0] = number = self._times
        try:
            yield number
        finally:
            self._seconds[number] = time.monotonic() - started_s
            self._now[0] = before

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Of a fixture that serves one test, the time is the test's."""
        if fixturedef.scope == "function":
            return (yield)
        with self._time() as number:
            self._shared[fixturedef] = number
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Set up, call and tear down."""
        self._passed, self._called, before = True, False, self._times
        with self._time() as number:
            result = yield
        known: Any = item
        found = [self._shared.get(each[-1]) for each in known._fixtureinfo.name2fixturedefs.values()]
        within = [each for each in self._shared.values() if each > before]
        self._items.append(
            {
                "test": item.nodeid,
                "seconds": self._seconds[number] - sum(self._seconds[each] for each in within),
                "passed": self._passed and self._called,
                "time": number,
                "shared": [each for each in found if each is not None],
            }
        )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that is skipped has not passed."""
        self._passed &= report.passed
        self._called |= report.when == "call"

    def pytest_sessionfinish(self) -> None:
        """What was seen, for the process that reads it."""
        found = {"items": self._items, "seconds": self._seconds}
        (self._folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """The process that started this one says where to write."""
    config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))
