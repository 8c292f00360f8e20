"""Several connections between real gloo ranks: no bit depends on how many there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.mark.parametrize("world", rest([2, 3], but=[2]))
def test_no_bit_depends_on_the_number_of_connections(world: int, tmp_path: Path) -> None:
    scenes = Scenes("tests.process.scenes_connections", world, tmp_path)
    for same in value(scenes, "bits"):
        assert len(same) > 200
        assert all(same)
    for seen in value(scenes, "attached"):
        assert seen == {"same": True, "told": [3, 3], "groups": 0}
    for differ, no_number in value(scenes, "refused"):
        assert differ.startswith("RanksDisagree")
        assert "GRADWIRE_CONNECTIONS" in differ
        assert no_number.startswith("ValueError: GRADWIRE_CONNECTIONS='many'")


@pytest.mark.rest
@pytest.mark.parametrize("world", [2, 3])
def test_no_bit_depends_on_when_receives_are_announced(world: int, tmp_path: Path) -> None:
    scenes = Scenes("tests.process.scenes_connections", world, tmp_path)
    for found in value(scenes, "ahead, given back"):
        assert found["held"] > 0
        assert found["left"] == 0
    for seen in value(scenes, "ahead"):
        assert len(seen["same"]) == 7 * 2 * 2
        assert all(seen["same"])


def test_links_between_nodes_take_several_connections_too(tmp_path: Path) -> None:
    scenes = Scenes("tests.process.scenes_connections", 4, tmp_path)
    for seen in value(scenes, "on nodes"):
        assert seen == {"same": True, "told": [3, 3], "groups": 0}


def test_what_ranks_gather_crosses_a_long_link_of_their_node_once(tmp_path: Path) -> None:
    scenes = Scenes("tests.process.scenes_connections", 4, tmp_path)
    for alone, together, same in value(scenes, "gathers in a ring"):
        assert not alone
        assert together
        assert same
