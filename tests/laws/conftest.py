"""The laws hold for small models, whose small gradients would never be early."""

from __future__ import annotations

import pytest

from gradwire.planning.tuning import Tuning
from tests.support import rig


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a few hundred bytes on they are, wherever there are several units."""
    few = 4 * (rig.SHAPES["last.bias"][0] + 1)
    monkeypatch.setattr(rig, "TUNING", Tuning(early_bytes=few))
