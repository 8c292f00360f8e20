"""Placements on real ranks: trainings on a simulated device, and errors that all ranks hear of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire._api.configuration import PlacementName
from tests.device.scenes_placed import (
    STAGED,
    STEPS,
    STREAMED,
    TRAINED,
    captured,
    captured_by_one,
    measures,
    mixed_placements,
    mixed_units,
    mixed_world,
    trains,
    unreachable,
    without_gloo,
)
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE
from tests.support.world import Ranks


@looped("name", TRAINED)
def test_a_training_by_way_of_the_host_is_the_cpus_bit_for_bit(two: Ranks, name: str) -> None:
    ranks = two(trains, EVERY_RECIPE[name])
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


ON_DEVICE = [("staged", name) for name in STAGED] + [("stream", name) for name in STREAMED]
READ_HOST = {"threshold", "gcomp"}


@looped(("placement", "name"), ON_DEVICE)
def test_a_training_on_the_device_is_the_cpus_bit_for_bit(two: Ranks, placement: str, name: str) -> None:
    streams = placement == "stream"
    ranks = two(trains, EVERY_RECIPE[name], "auto" if streams else "device", streams=streams)
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


def test_dense_steps_are_measured_by_clocks_that_wait_for_the_device(two: Ranks) -> None:
    ranks = two(measures)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["placement"] == "stream"
    assert ranks[0]["settled"]
    # A round that ended when it was issued would take no time: 1 µs is less than any message of gloo's.
    assert ranks[0]["allreduce_s"] > 1e-6
    assert ranks[0]["beta_s"] > 0.0


def test_what_ranks_agree_on_goes_over_the_models_backend_if_there_is_no_other(two: Ranks) -> None:
    for rank in two(without_gloo):
        assert rank["kind"] == "TransportError", "by way of the host nothing can be sent"
        assert "could not connect ranks [1]" in rank["text"]
        assert rank["there"]["placement"] == "stream"
        assert rank["there"]["digest"] == rank["here"]["digest"]
        assert rank["there"]["step"] == STEPS - 1


@looped(("asked", "streams"), [("host", False), ("device", False), ("device", True)])
def test_a_backward_pass_that_is_captured_is_refused_before_the_device_is_asked_for_anything(
    two: Ranks, asked: PlacementName, streams: bool
) -> None:
    for rank in two(captured, asked, streams=streams):
        assert rank["there"]["kind"] == "GradwireError", rank["there"]["text"]
        assert "this backward pass is captured into a graph" in rank["there"]["text"]
        same = ("digest", "step")
        assert [rank["there"][key] for key in same] == [rank["here"][key] for key in same]


def test_a_graph_on_one_rank_is_named_on_the_others(two: Ranks) -> None:
    other, own = two(captured_by_one)
    assert "this backward pass is captured into a graph" in own["text"]
    assert other["kind"] == "RanksDisagree"
    assert "rank 1: a backward pass that is captured into a graph" in other["text"]


@looped(
    ("scene", "field"),
    [
        (mixed_world, "device"),
        (mixed_placements, "placement"),
        (mixed_units, "most elements of a unit"),
    ],
)
def test_ranks_that_differ_are_refused_on_all(
    two: Ranks, scene: Callable[[], dict[str, str]], field: str
) -> None:
    for rank in two(scene):
        assert rank["kind"] == "RanksDisagree"
        assert f"disagree on {field}" in rank["text"]


@pytest.mark.rest
def test_a_rank_that_gloo_cannot_reach_is_an_error_on_all_long_before_the_timeout_and_the_next_attach_works(
    two: Ranks,
) -> None:
    for rank in two(unreachable):
        assert rank["kind"] == "TransportError"
        assert "could not connect ranks [0, 1]: set GLOO_SOCKET_IFNAME" in rank["text"]
        assert rank["took"] < 0.5, "of the timeout of the model's group"
        assert (rank["left"], rank["made"]) == (0, 1), "groups"
        assert rank["timeout"] == 1.0, "that of the model's group"
        assert rank["step"] == 1
