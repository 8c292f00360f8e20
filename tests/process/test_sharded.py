"""Real gloo ranks, two nodes of two: fully_shard inside, gradwire between."""

from __future__ import annotations

import pytest

from tests.process.ranks import Results, perform, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All scenes, on four ranks."""
    return perform("tests.process.scenes_sharded", 4, tmp_path_factory.mktemp("sharded"))


NATIVE = {
    "native": 5,
    "native, kept gathered": 5,
    "native, mixed precision": 5,
    "native, no_sync": 3,
    "native, set_requires_gradient_sync": 3,
}
"""By scene, how many steps were exchanged."""


@pytest.mark.parametrize("scene", NATIVE)
def test_dense_is_native_hsdp(world: Results, scene: str) -> None:
    # Sums in another order at most: a few roundings of values of about 1, in float32.
    for found in value(world, scene):
        assert found["off"] <= 1e-6
        assert found["alike"]
        assert found["steps"] == NATIVE[scene]


LEFT = {"int8": 0.8, "topk(ratio=0.1)": 0.9, "powersgd": 0.9, "gcomp": 0.8, "auto": 0.8}


@pytest.mark.parametrize("recipe", LEFT)
def test_recipes_learn_and_replicas_stay_identical(world: Results, recipe: str) -> None:
    for found in value(world, f"learns, {recipe}"):
        assert found["left"] < LEFT[recipe]
        assert found["alike"]


def test_two_planes_of_the_shard_are_remembered(world: Results) -> None:
    # Without vectors and tiny tensors, and with the rows that fill up shards.
    assert all(0.5 < found["memory"] < 1.05 for found in value(world, "learns, int8"))


@pytest.mark.parametrize("scene", ["checkpointed", "checkpointed, reentrant"])
def test_checkpoints_of_either_kind_change_nothing(world: Results, scene: str) -> None:
    assert value(world, scene) == [{"same": True, "steps": 4}] * 4


@pytest.mark.parametrize("scene", ["poisoned, dense", "poisoned, lossy"])
def test_a_nan_in_one_shard_stops_the_step_on_all_ranks(world: Results, scene: str) -> None:
    assert value(world, scene) == [{"nan": True, "kept": True, "step": 5, "alike": True}] * 4


def test_a_failure_is_raised_on_all_ranks_and_names_the_rank_among_all(world: Results) -> None:
    *others, own = value(world, "failed")
    assert own == "OSError: no room"
    assert all(other.startswith("PeerFailed: rank 3 failed") for other in others)


def test_a_run_resumes_bit_for_bit_and_shards_are_not_confused(world: Results) -> None:
    for found in value(world, "resumed"):
        assert found["same"]
        assert found["refused"]
        assert found["off"] == 0.0
        assert found["whole"] == [65, 65]


def test_the_mean_unsent_moves_between_shards_and_whole_parameters(world: Results) -> None:
    # The means of two ranks, and of four that are equal, are taken alike. Those of four that differ are added
    # up in another order, so that each way rounds partial sums three times, relative to the largest value.
    for found in value(world, "moved"):
        assert found["out"] == 0.0
        assert found["back"] <= 6 * 2**-24
        assert found["step"] == 5


def test_what_is_unsent_lands_in_the_shards(world: Results) -> None:
    assert value(world, "flushed") == [{"late": True, "alike": True}] * 4


REFUSED = {
    "no replicas": "replicas= the group or mesh dimension between nodes",
    "native": "on a mesh of 2 dimensions",
    "replicate": "was made by replicate()",
    "part": "is not sharded, while others are",
    "columns": "shards by rows",
    "offload": "CPUOffloadPolicy",
    "wrong dimension": "must have one rank in common",
    "everyone": "must have one rank in common",
    "crossed": "joins ranks with different shards",
}


def test_what_cannot_be_is_refused_with_what_to_do(world: Results) -> None:
    for found in value(world, "refused"):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
