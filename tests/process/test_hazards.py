"""Real gloo ranks: what hides on threads, from unused parameters to collectives of the user's own."""

from __future__ import annotations

import pytest

from tests.process.scenes_hazards import SCENES
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on two ranks."""
    return Scenes("tests.process.scenes_hazards", 2, tmp_path_factory.mktemp("hazards"))


@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene.endswith("dense")])
def test_dense_gives_the_values_of_plain_ddp(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [True, True]


LEARNING = (
    "unused, lossy",
    "static graph",
    "batch norm, lossy",
    "synchronised, lossy",
    "types, lossy",
    "tied, lossy",
    "checkpoint, lossy",
    "reentrant checkpoint, lossy",
    "compiled",
)


@pytest.mark.parametrize("scene", rest(LEARNING, but=["unused, lossy", "static graph", "compiled"]))
def test_a_lossy_recipe_learns_and_its_replicas_are_identical(world: Scenes, scene: str) -> None:
    found = value(world, scene)
    assert len({each["digest"] for each in found}) == 1
    assert all(each["losses"][1] < 0.8 * each["losses"][0] for each in found)


@pytest.mark.parametrize("scene", ["before ddp", "in finer buckets", "plain", "plain, all sent"])
def test_a_memory_format_that_changes_no_bucket_changes_no_training(world: Scenes, scene: str) -> None:
    assert value(world, f"memory format, {scene}") == 2 * [{"errors": [], "same": True}]


@pytest.mark.parametrize("scene", ["before attach", "before attach, views"])
def test_buckets_built_for_another_memory_format_are_refused_on_all_ranks(world: Scenes, scene: str) -> None:
    for found in value(world, f"memory format, {scene}"):
        [error] = found["errors"]
        assert error.startswith("ValueError: the memory format of '")
        assert "before wrapping the model" in error


@pytest.mark.parametrize("scene", ["later", "later, finer"])
def test_a_memory_format_that_changes_under_ddp_is_refused(world: Scenes, scene: str) -> None:
    for found in value(world, f"memory format, {scene}"):
        [error] = found["errors"]
        assert error.startswith("ValueError: parameters of this model have changed since attach: ")
        assert " has strides (" in error


def test_a_memory_format_that_changes_on_one_rank_is_heard_of_on_all(world: Scenes) -> None:
    one, other = value(world, "memory format, later on one rank")
    assert one["errors"][0].startswith("RanksDisagree")
    assert "a forward pass that it refuses" in one["errors"][0]
    assert other["errors"][0].startswith("ValueError: parameters of this model have changed since attach")


def test_a_branch_that_nobody_uses_is_neither_moved_nor_remembered(world: Scenes) -> None:
    for found in value(world, "unused, lossy"):
        assert found["never_moved"]
        assert found["never_remembered"]
        assert found["others_remembered"]


def test_dense_follows_ddp_in_a_static_graph(world: Scenes) -> None:
    assert all(found["dense"] for found in value(world, "static graph"))


def test_a_collective_of_the_user_inside_backward_changes_no_value(world: Scenes) -> None:
    assert value(world, "collective in backward, lossy") == [True, True]


def test_accumulation_under_no_sync_with_clipping_equals_plain_ddp(world: Scenes) -> None:
    assert value(world, "accumulation") == [True, True]


def test_bucket_sizes_change_no_number(world: Scenes) -> None:
    for found in value(world, "bucket sizes"):
        assert len(set(found)) == 1


def test_a_compiled_module_trains_as_the_eager_one(world: Scenes) -> None:
    for found in value(world, "compiled"):
        # Compiled and eager kernels may round differently, sixty steps long.
        assert found["losses"] == pytest.approx(found["eager"], rel=1e-3)


def test_models_that_come_and_go_leave_nothing_behind(world: Scenes) -> None:
    assert value(world, "attached again") == 2 * [{"descriptors": 0, "threads": 0, "groups": 0}]


def test_a_group_is_lent_again_once_every_rank_has_dropped_its_model(world: Scenes) -> None:
    one, other = value(world, "kept by one rank")
    assert one["groups"] == other["groups"]
    first, second, third = one["groups"]
    assert first != second, "rank 1 still had the first model"
    assert third == first
    assert one["digests"] == other["digests"]
