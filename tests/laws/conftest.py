"""The laws hold for small models, whose small gradients would never be early."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.planning.tuning import Tuning
from tests.support import rig
from tests.support.depth import FEW


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More rows take longer."""
    for item in items:
        if not FEW and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a few hundred bytes on they are, wherever there are several units."""
    few = 4 * (rig.SHAPES["last.bias"][0] + 1)
    monkeypatch.setattr(rig, "TUNING", Tuning(early_bytes=few))
