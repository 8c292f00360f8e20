"""Real gloo ranks: rounds among members."""

from __future__ import annotations

import pytest

from tests.process.scenes_members import ALSO, INSIDE, ROUNDS, SCENES
from tests.process.scenes_outer import EVERY
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On two ranks."""
    return Scenes("tests.process.scenes_members", 2, tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On four ranks: two replicas of two."""
    return Scenes("tests.process.scenes_members", 4, tmp_path_factory.mktemp("sites"))


AS_REPLICAS = {"same": True, "moves": True, "rounds": ROUNDS, "counted": True}
PLAIN = [name for name in SCENES if name not in INSIDE | ALSO]


@pytest.mark.parametrize("scene", rest(PLAIN, but=["int4, 0", "sparseloco, 2"]))
def test_members_that_stay_take_the_rounds_of_replicas_bit_for_bit(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [AS_REPLICAS] * 2


@pytest.mark.parametrize("scene", ["moved", "moved, with factors"])
def test_what_is_unsent_and_what_was_sent_go_along_to_a_fresh_meeting(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [AS_REPLICAS] * 2


@pytest.mark.parametrize("scene", rest(list(INSIDE), but=["ddp, int4, 0"]))
def test_members_of_two_ranks_take_the_rounds_of_replicas_bit_for_bit(sites: Scenes, scene: str) -> None:
    assert value(sites, scene) == [AS_REPLICAS] * 4


def test_a_meeting_leaves_nothing_behind_and_settings_stay_and_links_are_measured_once(world: Scenes) -> None:
    for rank in value(world, "anew"):
        assert (rank["overlap"], rank["rounds"], rank["measured"]) == (False, 9, 1)
        for second, last in zip(rank["held"][1], rank["held"][-1], strict=True):
            assert last <= second + 1


def test_a_fresh_meeting_compares_all_that_ranks_must_agree_on_in_one_question(world: Scenes) -> None:
    for counts in value(world, "questions"):
        assert max(counts[3:]) == max(counts[:3]) + 1


def test_rounds_by_time_come_after_as_many_steps_as_fit(world: Scenes) -> None:
    assert value(world, "hardly ever") == [1, 1]
    assert value(world, "as often as can be") == [1 + 4 * EVERY] * 2


@pytest.mark.rest
def test_losses_that_rise_are_compared_with_those_before_the_roster_changed(world: Scenes) -> None:
    for signs in value(world, "losses"):
        assert signs == ["the loss has risen from 1 to 2"]
