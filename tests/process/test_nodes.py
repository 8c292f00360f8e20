"""Real gloo ranks: two nodes of two, which add up among themselves before anything crosses between nodes."""

from __future__ import annotations

import pytest
import torch

from tests.process.scenes_nodes import RECIPES
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes on four ranks."""
    return Scenes("tests.process.scenes_nodes", 4, tmp_path_factory.mktemp("four"))


def test_dense_on_two_levels_is_dense(four: Scenes) -> None:
    for found in value(four, "dense is dense"):
        # Each way sums four numbers, of at most 4·largest in all, in another order: 3 additions each, and the
        # quarter is exact.
        assert found["apart"] <= 2 * 3 * 4 * found["largest"] * torch.finfo(torch.float32).eps
        assert found["largest"] > 0


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["dense", "topk(ratio=0.05)"]))
def test_a_recipe_learns_and_its_replicas_are_identical(four: Scenes, recipe: str) -> None:
    found = value(four, recipe)
    assert all(each["last"] < 0.8 * each["first"] for each in found)
    assert len({each["digest"] for each in found}) == 1
    assert all(each["step"] == 40 and each["world"] == [4, 2] for each in found)


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["dense", "topk(ratio=0.05)"]))
def test_the_report_tells_bytes_between_nodes_from_those_inside(four: Scenes, recipe: str) -> None:
    parameters = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8
    for each in value(four, recipe):
        sent, metered = each["sent"]
        assert sent == pytest.approx(metered, rel=1e-12)
        # Every element goes once to the neighbour and once back, less what a rank keeps: half each way.
        assert each["inside"] == 4 * parameters
        assert "on 2 nodes" in each["text"]
    if recipe == "dense":
        assert value(four, recipe)[0]["sent"][0] == 4 * parameters / 2  # a half, all-reduced between two


@pytest.mark.parametrize("recipe", rest(["dense", "int8", "topk(ratio=0.05)"], but=["topk(ratio=0.05)"]))
def test_a_NaN_on_one_rank_stops_the_step_on_all(four: Scenes, recipe: str) -> None:
    found = value(four, f"NaN, {recipe}")
    assert all(each["finite"] == [True, False, True] for each in found)
    assert all((each["step"], each["skipped"]) == (2, 1) for each in found)
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize("source", rest(["nodes", "plain", "hsdp"], but=["nodes"]))
def test_with_checksums_damage_is_raised_on_all_ranks_whatever_brings_gradients(
    four: Scenes, source: str
) -> None:
    found = value(four, f"damaged, {source}")
    assert [each["error"][0] for each in found] == ["PeerFailed", "PeerFailed", "PeerFailed", "WireError"]
    # By its number among all ranks, also where the message was between nodes or inside one.
    assert found[3]["error"][1].startswith("rank 3 received damaged bytes from rank ")
    assert all("3" in each["error"][1] for each in found)
    assert all(each["intact"] and each["step"] == 3 for each in found)
    # A call hears of it on all ranks, too, and works again after that.
    assert [each["diagnosed"] for each in found] == 3 * [["PeerFailed", 2]] + [["WireError", 2]]


@pytest.mark.parametrize("message", ["rows, 16", "pack, 16", "rows, 512", "pack, 512"])
def test_a_rank_without_memory_inside_its_node_is_paid_for_and_training_goes_on(
    four: Scenes, message: str
) -> None:
    found = [each[message] for each in value(four, "without room")]
    for rank, (before, during, after, model) in enumerate(found):
        assert (before, during, after) == ("", "MemoryError" if rank == 1 else "PeerFailed", "")
        assert model == found[0][-1]


def test_buffers_come_from_rank_0(four: Scenes) -> None:
    assert value(four, "buffers") == [True] * 4


@pytest.mark.rest
def test_states_resume_and_move(four: Scenes) -> None:
    moves = ("own", "to flat", "back", "one file per rank", "own files", "other nodes", "no nodes")
    by_dcp = ("own by DCP", "to flat by DCP")
    assert value(four, "state") == [dict.fromkeys((*moves, *by_dcp), True)] * 4


def test_flush_detach_and_diagnose_are_those_of_whole_parameters(four: Scenes) -> None:
    found = value(four, "handed over")
    assert all(each["flushed"] and each["some"] for each in found)
    assert len({each["digest"] for each in found}) == 1


def test_auto_goes_by_the_launcher_and_leaves_alone_what_would_not_gain(four: Scenes) -> None:
    for rank, found in enumerate(value(four, "auto finds")):
        assert {name: per_node for name, (per_node, _lines) in found.items()} == {
            "none": 1,
            "2": 2,
            "4": 1,
            "uneven": 1,
            "no number": 1,
            "uneven, asked to be flat": 1,
        }
        told = {name: lines for name, (_per_node, lines) in found.items() if lines}
        assert {name: len(lines) for name, lines in told.items()} == ({} if rank else {"uneven": 1})
        for line in told.get("uneven", ()):
            assert line.startswith("nodes differ in size, from 1 to 3 ranks: ")
            assert "nodes=None" in line


def test_auto_stays_flat_where_a_recipe_sends_little(four: Scenes) -> None:
    assert value(four, "left flat") == [{"dense": 2, "topk(ratio=0.001)": 1, "given": 2}] * 4


def test_nodes_may_be_groups_or_a_mesh_or_be_read_once(four: Scenes) -> None:
    ways = ("groups", "mesh", "across", "generators", "array")
    assert value(four, "other ways") == [dict.fromkeys(ways, 2)] * 4


def test_what_cannot_be_is_refused_on_all_ranks(four: Scenes) -> None:
    for rank, found in enumerate(value(four, "refused")):
        assert found["not alike"][0] == "RanksDisagree"
        assert "nodes" in found["not alike"][1]
        assert "say otherwise" in found["contradictory"][1]
        assert "differ in size" in found["uneven"][1]
        assert found["without one"][0] == ("ValueError" if rank == 3 else "RanksDisagree")
        assert "9" in found["no such rank"][1]
        assert "neither 'auto'" in found["a word"][1]
        assert "nodes=2 is neither 'auto'" in found["a number"][1]
        assert "nodes has 0, which is neither the ranks of a node nor a group" in found["ranks alone"][1]


def test_a_rank_that_cannot_connect_inside_its_node_is_named_on_all_ranks(four: Scenes) -> None:
    for rank, (text, cause, _made) in enumerate(value(four, "unconnected")):
        assert text == "ranks [1] could not connect to those of their node"
        assert cause == ("TransportError" if rank == 1 else "NoneType")


def test_a_model_that_was_refused_inside_a_node_leaves_its_group_to_the_next_one(four: Scenes) -> None:
    assert [made for *_said, made in value(four, "unconnected")] == [0] * 4


def test_groups_are_lent_to_the_next_model(four: Scenes) -> None:
    assert value(four, "lent") == [True] * 4


def test_ranks_may_have_different_numbers_of_batches(four: Scenes) -> None:
    assert len(set(value(four, "uneven"))) == 1
