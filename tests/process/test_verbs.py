"""The verbs over real gloo ranks give what the slow computation gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.ranks import perform, value

pytestmark = pytest.mark.process


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_verbs_over_gloo(world: int, tmp_path: Path) -> None:
    value(perform("tests.process.scenes_verbs", world, tmp_path), "verbs")
