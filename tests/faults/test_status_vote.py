"""Real gloo ranks: one rank's exception or NaN reaches all ranks in the same step, and training goes on."""

from __future__ import annotations

import pytest

from tests.faults.scenes_status_vote import DAMAGED, UNLUCKY
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process

ACCIDENTS = {
    "accident": "Accident",
    "accident, static graph": "Accident",
    "accident, unused": "Accident",
    "accident, exit": "SystemExit",
}
"""Scenes, and what is raised in them."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on three ranks of which one is unlucky."""
    return Scenes("tests.faults.scenes_status_vote", 3, tmp_path_factory.mktemp("verdict"))


@pytest.mark.parametrize("scene", rest(ACCIDENTS, but=["accident"]))
def test_backward_raises_the_accident_itself_where_it_happened(world: Scenes, scene: str) -> None:
    seen = value(world, scene)[UNLUCKY]
    assert (seen["error"], seen["text"]) == (ACCIDENTS[scene], "out of luck")
    assert seen["notes"] == [f"gradwire: step 5, rank {UNLUCKY}, encode of flat buffer 0 unit 0"]


@pytest.mark.parametrize("scene", rest(ACCIDENTS, but=["accident"]))
def test_backward_raises_on_the_other_ranks_and_names_the_one(world: Scenes, scene: str) -> None:
    for rank, seen in enumerate(value(world, scene)):
        if rank != UNLUCKY:
            assert seen["error"] == "PeerFailed"
            assert f"rank {UNLUCKY} failed" in seen["text"]


@pytest.mark.parametrize("scene", rest(ACCIDENTS, but=["accident"]))
def test_after_an_accident_everything_is_as_before_and_training_goes_on(world: Scenes, scene: str) -> None:
    found = value(world, scene)
    assert all(seen["intact"] for seen in found)
    assert all(seen["losses"][1] < 0.5 * seen["losses"][0] for seen in found)
    assert len({seen["digest"] for seen in found}) == 1


@pytest.mark.parametrize("scene", rest(["nan, topk", "nan, covap"], but=["nan, topk"]))
def test_a_nan_on_one_rank_makes_every_gradient_nan_and_is_forgotten(world: Scenes, scene: str) -> None:
    found = value(world, scene)
    for seen in found:
        assert seen["error"] is None
        assert not seen["any_finite"]
        assert seen["intact"]
        assert seen["skipped"] == 1
        assert seen["as_without"]
    assert len({seen["digest"] for seen in found}) == 1


def test_after_a_backward_pass_that_broke_off_the_next_one_says_so(world: Scenes) -> None:
    assert value(world, "broken off") == 3 * [{"first": "Accident", "then": "RuntimeError"}]


@pytest.mark.parametrize("name", rest(DAMAGED, but=["topk"]))
def test_damaged_bytes_are_noticed_on_all_ranks_in_their_step_and_training_goes_on(
    world: Scenes, name: str
) -> None:
    found = value(world, f"damaged, {name}")
    assert found[UNLUCKY]["error"] == "WireError"
    assert f"rank {UNLUCKY} received damaged bytes from rank" in found[UNLUCKY]["text"]
    assert f"gradwire: step 5, rank {UNLUCKY}, " in found[UNLUCKY]["notes"][0]
    for rank, seen in enumerate(found):
        assert rank == UNLUCKY or seen["error"] == "PeerFailed"
        assert rank == UNLUCKY or f"rank {UNLUCKY}" in seen["text"]
        assert seen["intact"]
        assert seen["losses"][1] < 0.5 * seen["losses"][0]
        assert seen["added"] > 0.0
    assert len({seen["digest"] for seen in found}) == 1


def test_checksums_on_some_ranks_only_are_refused_on_all(world: Scenes) -> None:
    for said in value(world, "one-sided"):
        assert "ranks disagree on checksums: rank 0: False" in said[0]
