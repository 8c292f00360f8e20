"""Real gloo ranks: frames of many segments, several of which are on their way at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.mark.parametrize("world", rest([2, 3], but=[3]))
def test_a_ring_of_many_segments_has_the_bits_of_a_plain_one(world: int, tmp_path: Path) -> None:
    assert value(Scenes("tests.process.scenes_ring", world, tmp_path), "means") == [[True] * 4] * world
