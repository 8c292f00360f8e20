"""Real gloo ranks: buffers travel under the backward pass, and every forward pass finds DDP's values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on two ranks."""
    return Scenes("tests.process.scenes_buffers", 2, tmp_path_factory.mktemp("buffers"))


BROADCASTS = {
    "buffers": [6, 1],
    "buffers, bucket views": [6, 1],
    "buffers, static graph": [6, 1],
    # A pass without gradients asks for none after it; one in training mode without backward does.
    "buffers, evaluating": [6, 3],
    "buffers, accumulating": [4, 1],
    "buffers, two backward passes": [5, 1],
    "buffers, replaced": [6, 1],
    # What is sent is out of date when backward ends, but for the first step, which has a single bucket.
    "buffers, computed again": [6, 5],
    "buffers, computed again and replaced": [6, 5],
    "buffers, nan": [6, 1],
    "buffers, compiled": [5, 1],
    "buffers, not broadcast": [0, 0],
    "buffers, detached": [6, 3],
}
"""By DDP, without a hook and with gradwire attached, whose first step is like any other's."""
FEW = (
    "buffers",
    "buffers, evaluating",
    "buffers, accumulating",
    "buffers, computed again",
    "buffers, detached",
)


@pytest.mark.parametrize("scene", rest(BROADCASTS, but=FEW))
def test_every_forward_pass_begins_with_what_ddp_would_have_broadcast(world: Scenes, scene: str) -> None:
    for found in value(world, scene):
        assert found["passes"] >= 5
        assert found["same"]
        assert found["trained alike"]
        assert found["broadcasts"] == BROADCASTS[scene]


def test_dense_steps_that_are_taken_apart_leave_the_broadcast_to_ddp(world: Scenes) -> None:
    for found in value(world, "buffers, taken apart"):
        assert found["broadcasts"] == [12, 4]  # the first, and those after each of three


def test_a_rank_without_a_batch_under_join_sends_what_its_peers_expect(world: Scenes) -> None:
    # DDP takes the buffers of another rank there, which have those of rank 0 by then: values differ.
    for found in value(world, "buffers, absent in join"):
        assert found["trained alike"]


def test_so_it_is_on_three_ranks(tmp_path: Path) -> None:
    three = Scenes("tests.process.scenes_buffers", 3, tmp_path)
    for scene in ("buffers", "buffers, computed again"):
        for found in value(three, scene):
            assert found["same"]
            assert found["trained alike"]
            assert found["broadcasts"] == BROADCASTS[scene]


def test_under_join_ddp_keeps_the_broadcast_whose_source_may_be_another_rank(world: Scenes) -> None:
    for found in value(world, "buffers, join"):
        assert found["same"]
        assert found["trained alike"]


@pytest.mark.parametrize("scene", ["buffers", "buffers, lossy", "buffers, taken apart"])
def test_all_ranks_have_the_same_when_backward_returns(world: Scenes, scene: str) -> None:
    one, other = (found["end"] for found in value(world, scene))
    assert one == other


def test_without_broadcasts_they_differ_at_the_end(world: Scenes) -> None:
    one, other = (found["end"] for found in value(world, "buffers, not broadcast"))
    assert one != other


def test_a_rank_may_evaluate_alone(world: Scenes) -> None:
    assert value(world, "buffers, one evaluates") == [[1], [1]]


def test_a_hook_of_the_users_own_stays_in_charge(world: Scenes) -> None:
    assert value(world, "buffers, hook") == [[10, 10, 10], [10, 10, 10]]
