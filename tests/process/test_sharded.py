"""Real gloo ranks, two nodes of two: fully_shard inside, gradwire between; in full tests of three, too."""

from __future__ import annotations

import os

import pytest

from tests.device.scenes_resumed import PLACES
from tests.process.scenes_sharded import DEAF, OF_SHARDS
from tests.support.simulated import DEFAULT
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


FULL = os.environ.get("GRADWIRE_LAWS") == "full"


@pytest.fixture(scope="module", params=[4, 6] if FULL else [4])
def ranks(request: pytest.FixtureRequest) -> int:
    """On both nodes together."""
    return int(request.param)


@pytest.fixture(scope="module")
def world(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes."""
    return Scenes("tests.process.scenes_sharded", ranks, tmp_path_factory.mktemp("sharded"))


NATIVE = {
    "native": 5,
    "native, kept gathered": 5,
    "native, mixed precision": 5,
    "native, a branch of one node": 5,
    "native, no_sync": 3,
    "native, set_requires_gradient_sync": 3,
}
"""By scene, how many steps were exchanged."""


@pytest.mark.parametrize("scene", rest(NATIVE, but=["native", "native, no_sync"]))
def test_dense_is_native_hsdp(world: Scenes, ranks: int, scene: str) -> None:
    # Two addends have no order. Three have, and what is accumulated without being sent is added up in another
    # one: a few roundings of values of about 1, in float32.
    most = 0.0 if ranks == 4 and scene != "native, no_sync" else 1e-6
    for found in value(world, scene):
        assert found["off"] <= most
        assert found["alike"]
        assert found["steps"] == NATIVE[scene]


LEFT = {"int8": 0.8, "topk(ratio=0.1)": 0.9, "powersgd": 0.9, "gcomp": 0.8, "auto": 0.8}
LEFT |= dict.fromkeys(OF_SHARDS, 0.9)


@pytest.mark.parametrize("recipe", rest(LEFT, but=["int8"]))
def test_recipes_learn_and_replicas_stay_identical(world: Scenes, recipe: str) -> None:
    for found in value(world, f"learns, {recipe}"):
        assert found["left"] < LEFT[recipe]
        assert found["alike"]


def test_two_planes_of_the_shard_are_remembered(world: Scenes) -> None:
    # Without vectors and tiny tensors, and with the rows that fill up shards.
    assert all(0.5 < found["memory"] < 1.05 for found in value(world, "learns, int8"))


@pytest.mark.parametrize("scene", rest(["checkpointed", "checkpointed, reentrant"], but=["checkpointed"]))
def test_checkpoints_of_either_kind_change_nothing(world: Scenes, ranks: int, scene: str) -> None:
    assert value(world, scene) == [{"same": True, "steps": 4}] * ranks


POISONED = ("poisoned, dense", "poisoned, dense, whole", "poisoned, lossy")


@pytest.mark.parametrize("scene", rest(POISONED, but=["poisoned, dense, whole", "poisoned, lossy"]))
def test_a_nan_in_one_shard_stops_the_step_on_all_ranks(world: Scenes, ranks: int, scene: str) -> None:
    assert value(world, scene) == [{"nan": True, "kept": True, "step": 5, "alike": True}] * ranks


def test_a_failure_is_raised_on_all_ranks_and_names_the_rank_among_all(world: Scenes) -> None:
    others = value(world, "failed")
    own = others.pop(3)
    assert own == "OSError: no room"
    assert all(other.startswith("PeerFailed: rank 3 failed") for other in others)


def test_a_run_resumes_bit_for_bit_and_shards_are_not_confused(world: Scenes) -> None:
    for found in value(world, "resumed"):
        assert found["same"]
        assert found["refused"]
        assert found["off"] == 0.0
        assert found["whole"] == [65, 65]


def test_the_mean_unsent_moves_between_shards_and_parameters(world: Scenes, ranks: int) -> None:
    # The mean of n ranks rounds n - 1 partial sums, and the share 1/n and its product unless n is a power of
    # two, each relative to the largest value. Of two ranks, and of four equal ones, nothing is rounded. Going
    # back, ranks differ, and are added up in another order.
    power = ranks & (ranks - 1) == 0
    rounded = (ranks - 1 + (0 if power else 2)) * 2**-24
    for found in value(world, "moved"):
        assert found["out"] <= (0.0 if power else rounded)
        assert found["back"] <= 2 * rounded
        assert found["step"] == 5


@pytest.mark.parametrize("recipe", rest(["topk(ratio=0.1)", "powersgd", "onebit"], but=["topk(ratio=0.1)"]))
def test_a_dcp_checkpoint_is_read_by_shards_and_moves_to_other_replicas(
    world: Scenes, ranks: int, recipe: str
) -> None:
    # The states of two replicas are added and halved, which rounds once. The mean of equal memories over n
    # ranks rounds n - 1 partial sums, and the share 1/n and its product unless n is a power of two.
    rounded = (ranks + 2) * 2**-24
    for found in value(world, f"dcp, {recipe}"):
        assert found["again"], "bit for bit, on as many replicas"
        assert found["asked"], "a rank reads its own replica alone"
        assert max(found[name] for name in ("more", "one", "flat")) <= rounded
        assert found["step"] == 3


@pytest.mark.rest
def test_what_is_left_in_folders_of_nodes_is_dropped_to_only_where_all_ranks_see_it(
    world: Scenes, ranks: int
) -> None:
    some, none = [str(ranks // 2)] * (ranks // 2), ["0"] * (ranks // 2)
    for found in value(world, "dropped"):
        assert found["loaded"] == 2
        assert f"ranks see {', '.join(some + none)} of its files" in found["said"]
        assert "copy what is left on each of them to all" in found["said"]
        assert found["first node's"]


@pytest.mark.rest
@pytest.mark.parametrize("way", ["own", "all", "mean", "folder", "dcp"])
@pytest.mark.parametrize("change", ["frozen", "thawed"])
def test_shards_that_fit_go_along_when_parameters_are_frozen_or_thawed(
    world: Scenes, change: str, way: str
) -> None:
    for found in value(world, change):
        each = found[way]
        assert "other parameter names" in each["said"], "refused, unless asked for"
        assert "missing='drop'" in each["said"]
        [said] = each["warned"]
        assert "blocks.1.weight" in said
        assert each["fits"] > 1
        assert each["same"]
        assert each["fresh"] == (["blocks.1.weight"] if change == "thawed" else [])
        assert each["step"] == 5


def test_what_is_unsent_lands_in_the_shards(world: Scenes, ranks: int) -> None:
    assert value(world, "flushed") == [{"late": True, "alike": True}] * ranks


@pytest.mark.rest
@pytest.mark.parametrize("placed", PLACES)
def test_hooks_of_shards_run_in_the_stream_of_their_reduction_and_nothing_races(
    world: Scenes, placed: str
) -> None:
    for found in value(world, f"on a device, {placed}"):
        assert found["races"] == []
        assert found["same"], "bit for bit as on the CPU"
        assert found["placement"] == placed
        assert found["steps"] == [3, 3]
        [stream] = found["streams"]
        assert stream != DEFAULT


@pytest.mark.rest
@pytest.mark.parametrize("call", DEAF)
def test_each_order_that_shards_rely_on_is_missed(world: Scenes, call: str) -> None:
    assert any(value(world, f"deaf to {call}")), "on some rank: it depends on when threads run"


REFUSED = {
    "no replicas": "replicas= the group or mesh dimension between nodes",
    "native": "FSDP averages between nodes itself",
    "replicate": "was made by replicate()",
    "part": "is not sharded, while others are",
    "columns": "shards by rows",
    "tensor parallel": "Tensor parallelism is not carried yet",
    "tensor parallel, by rows": "not by fully_shard",
    "tensor parallel, by columns": "not by fully_shard",
    "tensor parallel, ignored": "parameter '1.weight' is sharded, but not by fully_shard",
    "both": "by fully_shard and by tensor parallelism",
    "offload": "CPUOffloadPolicy",
    "wrong dimension": "must have one rank in common",
    "everyone": "must have one rank in common",
    "crossed": "joins ranks with different shards",
}


def test_what_cannot_be_is_refused_with_what_to_do(world: Scenes) -> None:
    for found in value(world, "refused"):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
