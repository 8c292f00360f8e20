"""Two levels on a device, on real ranks: sums inside a node and what is remembered stay there."""

from __future__ import annotations

import pytest

from tests.device.scenes_leveled import NODES, STREAMED, moves, with_groups_apart, without_room
from tests.device.scenes_placed import STEPS, trains
from tests.device.scenes_resumed import fails, resumes
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE
from tests.support.world import Ranks

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(4, tmp_path_factory.mktemp("leveled"))


@looped(("name", "placement"), [*((name, "stream") for name in STREAMED), ("topk", "staged")])
def test_two_levels_on_the_device_have_the_cpus_bits(four: Ranks, name: str, placement: str) -> None:
    asked = ("auto", True) if placement == "stream" else ("device", False)
    ranks = four(trains, EVERY_RECIPE[name], asked[0], streams=asked[1], nodes=NODES)
    assert len({rank["there"]["digest"] for rank in ranks}) == 1
    for rank in ranks:
        there, here = rank["there"], rank["here"]
        assert rank["races"] == []
        assert there["placement"] == placement
        assert (there["pinned"], there["copied_s"]) == (0, 0.0), "no gradient comes to the host"
        same = ("digest", "buffers", "step", "skipped", "per node")
        assert {key: there[key] for key in same} == {key: here[key] for key in same}
        assert there["sent"][1] == here["sent"][1] > 0, "inside"
        assert (there["step"], there["skipped"], there["per node"]) == (STEPS - 1, 1, 2)


@looped("name", ["topk", "powersgd"])
def test_what_is_saved_of_shards_on_the_device_resumes_with_the_cpus_bits(four: Ranks, name: str) -> None:
    for rank in four(resumes, EVERY_RECIPE[name], "stream", nodes=NODES):
        assert rank["placement"] == "stream"
        assert rank["remembers"]
        assert rank["same memory"]
        assert rank["same mean"]
        assert rank["resumed"] == rank["rewound"] == rank["through"]
        assert rank["races"] == []


def test_an_encode_that_fails_on_a_shard_is_heard_of_on_all_ranks(four: Ranks) -> None:
    ranks = four(fails, EVERY_RECIPE["topk"], "stream", nodes=NODES)
    assert [rank["there"]["kind"] for rank in ranks] == [
        "PeerFailed",
        "MemoryError",
        "PeerFailed",
        "PeerFailed",
    ]
    for rank in ranks:
        assert rank["there"]["spoilt"]
        assert rank["there"] == rank["here"]


def test_a_rank_without_memory_for_its_nodes_sum_is_paid_for(four: Ranks) -> None:
    for rank, found in enumerate(ranks := four(without_room)):
        assert found["found"] == ["", "MemoryError" if rank == 1 else "PeerFailed", ""]
        assert (found["step"], found["digest"]) == (2, ranks[0]["digest"])


def test_a_recipe_that_reads_the_host_takes_sums_and_shards_there_and_back(four: Ranks) -> None:
    for rank in four(moves):
        assert rank["there"]["seen"] == ["stream", "host", "stream"]
        assert rank["there"]["kept"] == [True] * 3
        assert rank["there"]["digest"] == rank["here"]["digest"]


def test_each_backend_has_groups_inside_nodes_and_between_them(four: Ranks) -> None:
    for rank in four(with_groups_apart):
        assert (rank["placement"], rank["step"], rank["flat"]) == ("stream", 1, "stream")
        assert rank["groups"] == 6, "three for tensors of the device, three for those on the CPU"
        assert rank["races"] == []
