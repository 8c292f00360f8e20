"""Placements on real ranks: trainings on a simulated device, and errors that all ranks hear of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.scenes_placed import STAGED, STEPS, STREAMED, TRAINED
from tests.support.looped import looped
from tests.support.world import Scenes, value


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return Scenes("tests.device.scenes_placed", 2, tmp_path_factory.mktemp("placed"))


@looped("name", TRAINED)
def test_a_training_by_way_of_the_host_is_the_cpus_bit_for_bit(world: Scenes, name: str) -> None:
    ranks = value(world, f"trains {name}")
    assert len({rank["there"]["digest"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["races"] == []
        assert rank["operators"] > 100 * STEPS, "somebody has watched"
        same = ("digest", "buffers", "step", "skipped", "placement")
        assert {key: rank["there"][key] for key in same} == {key: rank["here"][key] for key in same}
        assert rank["there"]["step"] == STEPS - 1
        assert rank["there"]["skipped"] == 1
        assert rank["there"]["pinned"] >= rank["gradient_bytes"]
        assert rank["there"]["copied_s"] > 0.0
        assert rank["here"]["pinned"] == rank["here"]["copied_s"] == 0


ON_DEVICE = [("stages", "staged", name) for name in STAGED] + [
    ("streams", "stream", name) for name in STREAMED
]
READ_HOST = {"threshold", "gcomp"}


@looped(("scene", "placement", "name"), ON_DEVICE)
def test_a_training_on_the_device_is_the_cpus_bit_for_bit(
    world: Scenes, scene: str, placement: str, name: str
) -> None:
    ranks = value(world, f"{scene} {name}")
    assert len({rank["there"]["digest"] for rank in ranks}) == 1
    for rank in ranks:
        there, here = rank["there"], rank["here"]
        assert rank["races"] == []
        assert rank["operators"] > 100 * STEPS, "somebody has watched"
        assert there["placement"] == ("host" if name in READ_HOST else placement)
        assert ("reads numbers on the host" in there["why"]) == (name in READ_HOST)
        assert bool(there["pinned"]) == (name in READ_HOST)
        same = ("digest", "buffers", "step", "skipped")
        assert {key: there[key] for key in same} == {key: here[key] for key in same}
        assert (there["step"], there["skipped"]) == (STEPS - 1, 1)


def test_dense_steps_are_measured_by_clocks_that_wait_for_the_device(world: Scenes) -> None:
    ranks = value(world, "measures")
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["placement"] == "stream"
    assert ranks[0]["settled"]
    # A round that ended when it was issued would take no time: 1 µs is less than any message of gloo's.
    assert ranks[0]["allreduce_s"] > 1e-6
    assert ranks[0]["beta_s"] > 0.0


def test_what_ranks_agree_on_goes_over_the_models_backend_if_there_is_no_other(world: Scenes) -> None:
    for rank in value(world, "without gloo"):
        assert rank["kind"] == "TransportError", "by way of the host nothing can be sent"
        assert "could not connect ranks [1]" in rank["text"]
        assert rank["there"]["placement"] == "stream"
        assert rank["there"]["digest"] == rank["here"]["digest"]
        assert rank["there"]["step"] == STEPS - 1


@looped("placed", ["host", "staged", "streamed"])
def test_a_backward_pass_that_is_captured_is_refused_before_the_device_is_asked_for_anything(
    world: Scenes, placed: str
) -> None:
    for rank in value(world, f"{placed}, captured"):
        assert rank["there"]["kind"] == "GradwireError", rank["there"]["text"]
        assert "this backward pass is captured into a graph" in rank["there"]["text"]
        same = ("digest", "step")
        assert [rank["there"][key] for key in same] == [rank["here"][key] for key in same]


def test_a_graph_on_one_rank_is_named_on_the_others(world: Scenes) -> None:
    other, own = value(world, "captured by one")
    assert "this backward pass is captured into a graph" in own["text"]
    assert other["kind"] == "RanksDisagree"
    assert "rank 1: a backward pass that is captured into a graph" in other["text"]


@looped(
    ("scene", "field"),
    [
        ("mixed world", "device"),
        ("mixed placements", "placement"),
        ("mixed units", "most elements of a unit"),
    ],
)
def test_ranks_that_differ_are_refused_on_all(world: Scenes, scene: str, field: str) -> None:
    for rank in value(world, scene):
        assert rank["kind"] == "RanksDisagree"
        assert f"disagree on {field}" in rank["text"]


@pytest.mark.rest
def test_a_rank_that_gloo_cannot_reach_is_an_error_on_all_long_before_the_timeout_and_the_next_attach_works(
    world: Scenes,
) -> None:
    ranks: list[dict[str, Any]] = value(world, "unreachable")
    for rank in ranks:
        assert rank["kind"] == "TransportError"
        assert "could not connect ranks [0, 1]: set GLOO_SOCKET_IFNAME" in rank["text"]
        assert rank["took"] < 0.5, "of the timeout of the model's group"
        assert (rank["left"], rank["made"]) == (0, 1), "groups"
        assert rank["timeout"] == 1.0, "that of the model's group"
        assert rank["step"] == 1
