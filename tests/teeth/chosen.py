"""A plugin of pytest that runs the tests of a list, and writes down which one runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.teeth.recorder import FOLDER


class Chosen:
    """`chosen.json` in `folder` has seconds by test; one that takes longer hangs, and fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._within_s: dict[str, float] = json.loads((folder / "chosen.json").read_text(encoding="utf-8"))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The others of the same files are left out."""
        items[:] = [item for item in items if item.nodeid in self._within_s]
        for item in items:
            item.add_marker(pytest.mark.timeout(self._within_s[item.nodeid]), append=False)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Known even if the test ends the process."""
        (self._folder / "runs").write_text(nodeid, encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """The process that started this one says which tests."""
    config.pluginmanager.register(Chosen(Path(os.environ[FOLDER])))
