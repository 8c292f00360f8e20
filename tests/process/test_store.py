"""Real processes: rounds over a folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.scenes_store import INSIDE, RECIPES, SCENES, SITE
from tests.process.stored_job import check_that_no_kill_costs_a_sealed_round
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytest.importorskip("obstore")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On two ranks."""
    return Scenes("tests.process.scenes_store", 2, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On three ranks."""
    return Scenes("tests.process.scenes_store", 3, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On four ranks."""
    return Scenes("tests.process.scenes_store", 4, tmp_path_factory.mktemp("four"))


SAME = {"same": True, "moves": True}
BESIDE = [name for name in SCENES if name not in ("refused", *INSIDE, *SITE)]


@pytest.mark.parametrize("scene", rest(BESIDE, but=["sparseloco, 0"]))
def test_rounds_over_a_folder_are_those_of_replicas_bit_for_bit(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [SAME] * 2


@pytest.mark.rest
@pytest.mark.parametrize("scene", [f"{recipe}, 0" for recipe in RECIPES])
def test_so_are_those_of_three(three: Scenes, scene: str) -> None:
    assert value(three, scene) == [SAME] * 3


@pytest.mark.parametrize("scene", rest(INSIDE, but=["fsdp2, sparseloco, 0"]))
def test_sites_of_two_ranks_take_the_rounds_of_replicas_bit_for_bit(four: Scenes, scene: str) -> None:
    assert value(four, scene) == [SAME] * 4


@pytest.mark.rest
def test_a_site_of_two_ranks_trains_alone_until_one_of_a_single_rank_is_there(world: Scenes) -> None:
    found = {"before": [0, 7, ["alone"]], "after": [1, ["a", "b"], 1, True]}
    assert value(world, "alone") == [found] * 2


def test_the_first_rank_of_a_site_decides_when_rounds_by_time_come(world: Scenes) -> None:
    assert value(world, "paced") == [[2, 10, 18]] * 2


def test_ranks_of_a_site_that_were_asked_otherwise_are_refused_together(world: Scenes) -> None:
    first, second = value(world, "asked otherwise")
    for every, name, recipe in (first, second):
        assert re.match(r"RanksDisagree: ranks disagree on every: rank 0: 2 .*; rank 1: 3 ", every)
        assert re.match(r"RanksDisagree: ranks disagree on name: rank 0: site-0 .*; rank 1: site-1 ", name)
        assert "int4(block=128, feedback=True, collective='all_reduce') needs several messages" in recipe
    assert [each[2].partition(":")[0] for each in (first, second)] == ["PeerFailed", "ValueError"]


@pytest.mark.rest
def test_all_ranks_of_a_site_hear_that_another_process_has_its_name(world: Scenes) -> None:
    for told in value(world, "named twice"):
        assert told.startswith("GradwireError: another process has taken the name 'a' of this replica")


@pytest.mark.rest
def test_a_site_by_fsdp2_goes_on_from_its_save_and_from_the_folder_alone(world: Scenes) -> None:
    found = {"same": True, "rounds": 3, "moves": True, "from the folder": [True, 3]}
    assert value(world, "saved") == [found] * 2


def test_recipes_whose_replicas_answer_each_other_are_refused_in_words(world: Scenes) -> None:
    for found in value(world, "refused"):
        assert len(found) == 4
        assert all("take one in which each replica's payload is made without the others" in e for e in found)


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_kills_and_newcomers_cost_no_sealed_round_and_a_job_goes_on_from_the_folder(tmp_path: Path) -> None:
    check_that_no_kill_costs_a_sealed_round(str(tmp_path / "run"), tmp_path)
