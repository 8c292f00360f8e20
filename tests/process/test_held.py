"""Real gloo ranks: what users do around training, as public reports have it, changes nothing."""

from __future__ import annotations

import pytest

from tests.process.scenes_held import KINDS, PARTS
from tests.support.world import Scenes, value

pytestmark = [pytest.mark.process, pytest.mark.rest]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On two ranks."""
    return Scenes("tests.process.scenes_held", 2, tmp_path_factory.mktemp("held"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_before_the_first_step_changes_no_bit(world: Scenes, kind: str) -> None:
    assert value(world, f"evaluated first, {kind}") == [True] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_written_later_has_the_values_of_its_moment(world: Scenes, kind: str) -> None:
    assert value(world, f"saved beside, {kind}") == [{"kept": True, "moved": True}] * 2


@pytest.mark.parametrize(("recipe", "how"), PARTS)
def test_fsdp_2_accumulates_in_its_own_ways(world: Scenes, recipe: str, how: str) -> None:
    # int8 rounds each scatter by 1/127 of a block's largest at most, and two are added up.
    for apart in value(world, f"in parts, {recipe}, {how}"):
        assert apart < (1e-6 if recipe == "dense" else 2 / 127)
