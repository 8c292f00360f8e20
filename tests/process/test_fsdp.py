"""Real gloo ranks: FSDP2's own gathers and scatters, carried by gradwire, beside stock FSDP2."""

from __future__ import annotations

import pytest
import torch

from tests.process.scenes_fsdp import LEFT_OUT, MOVED, NODES, SUITS
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """The scenes on two ranks."""
    return Scenes("tests.process.scenes_fsdp", 2, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """The scenes on four ranks."""
    return Scenes("tests.process.scenes_fsdp", 4, tmp_path_factory.mktemp("fsdp of four"))


DENSE = {
    "dense": 6,
    "dense, clipped": 6,
    "dense, accumulated": 4,
    "dense, sent_twice": 5,  # before an optimizer has stepped, no scatter is known to wait for it
    "dense, branching": 6,
    "dense, divided": 6,
    "dense, prefetched": 6,
    "dense, kept gathered": 6,
}
"""By scene, how many steps an optimizer makes."""


@pytest.mark.parametrize("scene", rest(DENSE, but=["dense", "dense, accumulated"]))
def test_dense_is_stock_fsdp2_bit_for_bit(two: Scenes, scene: str) -> None:
    for found in value(two, scene):
        assert found["off"] == 0.0
        assert found["losses"][0] == found["losses"][1]
        assert found["step"] == DENSE[scene]
        assert found["sent"] == [["float32"], ["float32"]]
        assert found["memory"] == 0


def test_stocks_bytes_under_mixed_precision_are_those_of_this_torch(two: Scenes) -> None:
    for found in value(two, "dense, bfloat16"):
        assert found["off"] == 0.0
        assert found["losses"][0] == found["losses"][1]
        # Since torch 2.15 gradients are scattered in the parameters' own type, unless reduce_dtype= is given.
        scattered = "float32" if torch.__version__ >= (2, 15) else "bfloat16"
        assert found["sent"] == [["bfloat16"], [scattered]]


def test_dense_counts_the_bytes_that_gloo_sends(two: Scenes) -> None:
    for found in value(two, "dense"):
        gathered, scattered = found["bytes"]
        # Uneven rows are filled up: a few of 65 here. The root is gathered once, its blocks twice.
        assert 4 * found["numel"] / 2 < gathered < 2 * 4 * found["numel"] / 2 * 1.1
        assert 2 * 4 * found["numel"] / 2 <= scattered < 2 * 4 * found["numel"] / 2 * 1.1
        assert found["ring"] == gathered + scattered / 2
        assert found["told"] == [gathered + scattered, gathered, scattered]
        assert "gathered as" in found["text"]


REFUSED = {
    "auto": "auto does not choose among them yet",
    "topk": "choose dense, bf16, fp8, int8 or int4",
    "collective": "choose dense, bf16, fp8, int8 or int4",
    "grid": "pass the one between nodes as replicas=",
    "part": "call it on the whole model",
    "allocating": "set_allocate_memory_from_process_group_for_comm",
    "twice": "this model is carried already, by its traffic of FSDP2",
    "mixed": "gathered as raw bytes",
    "ignored": "leave ignored_params out",
    "gather": "gather='int4' is none of None, 'bf16', 'int8' and 'exact'",
    "inside": "inside= goes with replicas=",
    "policy": "policy= has no meaning",
    "checksums": "checksums= has no meaning",
    "process group": "process_group= has no meaning",
    "optimizer": "has no parameter of this model",
    "nodes": "nodes differ in size",
    "ranks": "ranks disagree on recipe",
    "seed": "ranks disagree on seed",
    "on one rank": "is not for FSDP2's own scatters",
    "plain module": "inside= and gather= are for modules under fully_shard",
}


def test_what_cannot_be_is_refused_with_what_to_do(four: Scenes) -> None:
    for found in value(four, "refused"):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
        assert [name for name in found if name not in REFUSED and found[name]] == [], found


def test_a_model_that_is_refused_gives_its_groups_back(four: Scenes) -> None:
    for found in value(four, "refused with groups"):
        assert "checksums= has no meaning" in found["checksums"][0]
        assert "no room" in found["no room"][0]
        assert [left for _said, left in found.values()] == [0, 0]


def test_the_group_over_which_ranks_agree_goes_back_with_its_model(two: Scenes) -> None:
    for found in value(two, "agrees elsewhere"):
        lent = {"attached, then gone": 1, "gone": 0, "attached, then detached": 1, "detached": 0}
        assert found == {**lent, "new": 0}


def test_all_ranks_compute_with_the_same_rounded_weights_and_masters_stay_exact(two: Scenes) -> None:
    for scene in ("gathers int8", "gathers int8, recomputing", "gathers int8 of bfloat16"):
        for found in value(two, scene):
            assert found["times"] == (3 if "recomputing" in scene else 2)
            assert found["alike"]
            assert found["same"], "in forward, recomputation and backward"
            assert 0.0 < found["rounding"] <= (1.0 if "bfloat16" not in scene else 2.1)
            assert found["masters"]
            assert found["kinds"] == ["int8"]


def test_a_gather_in_bf16_rounds_to_the_nearest_and_leaves_16_bits_as_they_are(two: Scenes) -> None:
    for found in value(two, "gathers bf16"):
        assert found["bf16"]
        assert not found["as it is"]
        assert found["kinds"] == ["bf16"]
    for found in value(two, "gathers bf16 of bfloat16"):
        assert found["bf16"]
        assert found["kinds"] == ["bfloat16, which has 16 bits already"]
    said = [found["said"] for found in value(two, "gathers bf16 of bfloat16")]
    assert said == [["INFO: parameters are gathered in bfloat16, which has 16 bits already"], []]
    for found in value(two, "gathers as it is"):
        assert found["as it is"]


def test_a_gather_over_another_group_goes_as_it_is_and_the_report_says_so(four: Scenes) -> None:
    for found in value(four, "gathers int8 over half"):
        assert found["same"]
        assert found["alike"]
        rule = "float32 over groups of 2 (reshard_after_forward), as these values are rounded already"
        assert found["kinds"] == [rule, "int8"]
    said = [found["said"] for found in value(four, "gathers int8 over half")]
    assert said == [[f"INFO: parameters are gathered in {rule}"], [], [], []]


@pytest.mark.parametrize("scene", rest(MOVED, but=["fused", "load_state_dict"]))
def test_a_gather_sends_masters_as_they_are_now(two: Scenes, scene: str) -> None:
    for found in value(two, f"moved by {scene}"):
        assert found["moved"]
        assert found["rounding"] <= 1.0
        assert found["is rounded"]
        assert found["alike"]
        assert found["kinds"] == ["int8"]


def test_within_exact_weights_are_the_masters(two: Scenes) -> None:
    for found in value(two, "exactly"):
        assert found["block"] == [False, True, False]
        assert found["root"] == [False, True, False]
        assert found["kinds"] == ["float32, as wire.exact() asks", "int8"]


SUMMED = {"bf16": 2**-8, "fp8": 0.04, "int8": 0.01, "int4(feedback=False)": 0.25, "int4": 0.15}
"""The most by which a scatter of normal numbers is off, as a share of their norm: a few times less than a
code's distance."""


@pytest.mark.parametrize("recipe", SUMMED)
def test_a_scatter_is_off_by_its_rounding(two: Scenes, recipe: str) -> None:
    for found in value(two, f"summed, {recipe}"):
        assert 0.0 < found["off"] < SUMMED[recipe]
        assert found["kinds"] == [recipe]
        assert (found["memory"] > 0) == (recipe == "int4")


CONSERVED = {
    "conserved": (5e-6, 5),
    # Before an optimizer has stepped, no scatter is known to wait for it: the first two count as steps.
    "conserved, sent twice": (5e-6, 6),
    "conserved, int8": (5e-6, 5),
    "conserved in bfloat16": (0.01, 5),
}
"""By scene: a few roundings of float32, or of memory in bfloat16, as a share of the largest sum; steps."""


@pytest.mark.parametrize("scene", CONSERVED)
def test_all_that_is_given_arrives_or_is_unsent(two: Scenes, scene: str) -> None:
    most, steps = CONSERVED[scene]
    for found in value(two, scene):
        assert found["off"] < most
        assert found["step"] == steps
        assert found["kinds"] == ["int8(feedback=True)" if "int8" in scene else "int4"]
        # Two ranks, and rows that are filled up: 8 of 50 and 50 elements, and what they were before.
        assert found["memory"] == 2 * 2 * (4 * 50 + 25) * (2 if "bfloat16" in scene else 4)


def test_what_is_unsent_stays_under_its_name_in_whatever_order_torch_packs(two: Scenes) -> None:
    for found in value(two, "conserved by type"):
        is_sorted = torch.__version__ >= (2, 15)
        assert found["order"] == ([0, 2, 1] if is_sorted else [0, 1, 2])
        # Gradients in bfloat16 are rounded once more where they arrive.
        assert all(off < (0.03 if name == "between" else 5e-6) for name, off in found["off"].items())
        assert all(found["waits"].values())


def test_another_order_of_packing_than_torch_tells_is_refused_in_the_first_pass(two: Scenes) -> None:
    for found in value(two, "unpacked otherwise"):
        assert "packs the gradients of module 'the root' in another order" in found


def test_without_memory_int4_is_right_in_the_mean(two: Scenes) -> None:
    # Of 350 elements none should be off by more than five standard errors: one in 5000 such tests is.
    assert max(value(two, "unbiased")) < 5.0


def test_what_is_unsent_waits_where_a_parameter_has_no_gradient(two: Scenes) -> None:
    for found in value(two, "waited"):
        assert found["stays"]
        assert found["moves"]
        assert found["kinds"] == ["int4", "int4, without memory"]
        assert found["text"]


@pytest.mark.parametrize("how", rest([*LEFT_OUT, "resumed"], but=["cleared", "nan", "scaler"]))
def test_a_step_that_is_left_out_leaves_no_trace(two: Scenes, how: str) -> None:
    for found in value(two, f"left out, {how}"):
        assert found["same"]
        assert found["finite"]
        assert found["step"] == 4
        assert found["dropped"] == 1
        if "nan" in how:
            assert any(found["nan"]), "a NaN on one rank arrives"


def test_the_way_back_costs_half_of_the_memory(two: Scenes) -> None:
    for found in value(two, "kept"):
        assert "skipped='keep'" in found["refused"]
        assert found["memory"] == [2 * (4 * 50 + 25) * 4, 2 * 2 * (4 * 50 + 25) * 2]
        assert found["conserved, off"] < 5e-6


@pytest.mark.parametrize("recipe", ["int4", "int4(feedback=False)"])
def test_a_run_resumes_bit_for_bit(two: Scenes, recipe: str) -> None:
    for found in value(two, f"resumed, {recipe}"):
        assert found["same"]
        assert found["step"] == 6
        assert found["memory"] == 0
        assert "are missing" in found["neighbour"]
        assert "not of FSDP2's own traffic" in found["strange"]


def test_what_is_unsent_moves_to_another_world(four: Scenes) -> None:
    for found in value(four, "in another world"):
        # Sums of two to four numbers of float32, and their mean.
        assert max(found[way] for way in ("list", "folder", "back", "mean", "one lost")) < 1e-6
        assert "are missing" in found["lacking"]
        assert found["step"] == 3


@pytest.mark.parametrize("then", ["int8", "dense", "int4(block=64)"])
def test_a_switch_takes_along_what_is_unsent(two: Scenes, then: str) -> None:
    for found in value(two, f"switched to {then}"):
        remembers = then.startswith("int4")
        # Without memory the error of int8 in three steps is lost; that of int4 is not.
        assert found["off"] < (0.02 if then == "int8" else 5e-6)
        assert (found["memory"][-1] > 0) == remembers
        assert found["kinds"] == [["int8"], ["float32" if then == "dense" else then]]
        assert "not for FSDP2's own scatters" in found["refused"] or "switch" in found["refused"]
        assert found["unlike"]


def test_detaching_hands_over_what_is_unsent_and_leaves_stock_fsdp2(two: Scenes) -> None:
    for found in value(two, "detached"):
        assert found["off"] < 5e-6
        assert found["late"]
        assert found["stock"] < 1e-6
        assert "was detached" in found["refused"]
        assert found["again"] == "int8"


SOON = ("plain", "sent_twice", "branching", "recomputing", "bfloat16")


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("name", rest(SUITS, but=SOON))
def test_it_trains_like_stock_fsdp2(two: Scenes, name: str, recipe: str) -> None:
    for found in value(two, f"{recipe}, {name}"):
        ours, stock = found["losses"]
        assert found["alike"]
        assert ours != stock
        # Of six steps of AdamW, in which a value of either sign may move by the learning rate.
        assert abs(ours[-1] - stock[-1]) < 0.1 * stock[0]
        assert ours[-1] < ours[0]


def test_inside_nodes_its_own_traffic_travels_in_few_bits_beside_a_recipe_between_them(four: Scenes) -> None:
    for found in value(four, "inside nodes"):
        ours, plain = found["losses"]
        assert found["alike"]
        assert found["moved"]
        assert abs(ours[-1] - plain[-1]) < 0.1 * plain[0]
        assert found["exact"] == [False, True]
        assert found["kinds"] == [["float32, as wire.exact() asks", "int8"], ["int8"]]
        assert "FSDP2 sends" in found["text"]
        assert found["after"], "stock FSDP2 again"
        assert "without feedback" in found["refused"]
        assert "gather='fp8'" in found["gather"]


def test_passes_that_checkpoints_nest_are_parts_of_one(two: Scenes) -> None:
    nested, plain = value(two, "within checkpoints, True"), value(two, "within checkpoints, False")
    for found, other in zip(nested, plain, strict=True):
        assert found["step"] == 5
        assert found["ended"] == 5
        assert found["warned"] == []
        assert found == other


def test_a_target_is_told_as_long_as_the_model_lives(two: Scenes) -> None:
    for found in value(two, "told without a wire"):
        assert len(found["told"]) == 3
        assert found["gone"]


BY_NODES = {
    # Bytes of a coded row of 113 elements, and of what is remembered: two rows, and what they were before.
    "bf16": (226, 0),
    "int8": (113 + 2 * 4 + 3, 0),
    "int4": (50 + 7 + 2 * 4 + 3, 2 * 2 * 113 * 4),
}


@pytest.mark.parametrize(
    "recipe", ["int4", *(pytest.param(each, marks=pytest.mark.rest) for each in ("bf16", "int8"))]
)
@pytest.mark.parametrize("how", rest(NODES, but=["crossed"]))
def test_two_levels_are_a_slow_twin_to_the_bit(four: Scenes, how: str, recipe: str) -> None:
    row, memory = BY_NODES[recipe]
    for found in value(four, f"by nodes {how}, {recipe}"):
        assert found["same"] == [True] * 4
        assert found["unsent"]
        assert found["others"] == [0.0] * (2 if memory else 4)
        assert found["memory"] == memory
        sent, inside = found["bytes"]
        # Gathers go as they are. Of a ring among four, a node's link carries three rows, for two ranks.
        gathered = 1.5 * 4 * 113
        assert sent == pytest.approx(row, abs=4)
        assert inside == 2 * 4 * 113 + gathered
        assert found["ring"] == 2 * gathered
        assert "in nodes" in found["text"]


@pytest.mark.parametrize("how", rest(NODES, but=["apart"]))
def test_gathers_by_nodes_bring_the_weights_of_one_among_all_ranks(four: Scenes, how: str) -> None:
    for found in value(four, f"gathers by nodes {how}"):
        assert found["same"]
        assert found["alike"]
        assert found["exact"]
        (flat, nothing), (across, inside) = found["bytes"]
        assert nothing == 0.0
        # Of three rows from other ranks, one comes from the other node. The neighbour passes on two.
        assert across == flat / 3
        assert inside > 2 * across


def test_two_levels_lose_nothing(four: Scenes) -> None:
    for found in value(four, "conserved by nodes"):
        assert found["off"] < 5e-6
        assert found["step"] == 5
        assert found["memory"] == BY_NODES["int4"][1]


def test_a_run_on_nodes_resumes_bit_for_bit(four: Scenes) -> None:
    for found in value(four, "resumed by nodes"):
        assert found["same"]
        assert found["step"] == 6


def test_what_is_unsent_moves_to_other_nodes(four: Scenes) -> None:
    for found in value(four, "on other nodes"):
        assert max(found[way] for way in ("flat", "apart", "back", "mean")) < 1e-6
        assert "on other nodes" in found["lacking"]


@pytest.mark.rest
@pytest.mark.parametrize("then", ["int8", "dense"])
def test_a_switch_on_nodes_takes_along_what_is_unsent(four: Scenes, then: str) -> None:
    for found in value(four, f"switched by nodes to {then}"):
        assert found["off"] < (0.02 if then == "int8" else 5e-6)
        assert found["memory"][-1] == 0
        assert found["unlike"]


@pytest.mark.rest
def test_detaching_on_nodes_hands_over_what_is_unsent(four: Scenes) -> None:
    for found in value(four, "detached by nodes"):
        assert found["off"] < 5e-6
        assert found["late"]
        assert found["stock"] < 1e-6


@pytest.mark.rest
@pytest.mark.parametrize("how", ["cleared", "nan"])
def test_a_step_that_is_left_out_on_nodes_leaves_no_trace(four: Scenes, how: str) -> None:
    for found in value(four, f"left out by nodes, {how}"):
        assert found["same"]
        assert found["finite"]
        assert found["dropped"] == 1
        assert any(found["nan"]) == (how == "nan")


@pytest.mark.parametrize("recipe", ["int4", pytest.param("int8", marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", rest(["plain", "branching", "prefetched", "bfloat16"], but=["prefetched"]))
def test_it_trains_like_stock_fsdp2_on_nodes(four: Scenes, name: str, recipe: str) -> None:
    for found in value(four, f"{recipe} by nodes, {name}"):
        ours, stock = found["losses"]
        assert found["alike"]
        assert ours != stock
        assert abs(ours[-1] - stock[-1]) < 0.1 * stock[0]


@pytest.mark.parametrize("scene", rest(["predicted by nodes", "predicted"], but=["predicted by nodes"]))
def test_plans_have_the_bytes_that_are_counted(four: Scenes, scene: str) -> None:
    for found in value(four, scene):
        for text, each in found.items():
            planned, counted = each["planned"], each["counted"]
            if scene == "predicted by nodes" and text == "dense":
                # A wire that codes nothing does not tell links apart.
                planned, counted = planned[1:], counted[1:]
            # A plan's memory is without what fills shards up.
            assert counted[:-1] == pytest.approx(planned[:-1]), text
            assert planned[-1] <= counted[-1] < 1.2 * planned[-1] + 1, text
            assert each["levels"] == [scene == "predicted by nodes" and text != "dense"] * 2, text


def test_nodes_that_do_not_suit_are_told_at_attach_and_in_the_report(four: Scenes) -> None:
    for rank, found in enumerate(value(four, "on unequal nodes")):
        for name, said in found.items():
            falls_back = name in ("int8", "switched to int8")
            assert said["why"] == ("nodes differ in size, from 1 to 3 ranks" if falls_back else "")
            assert len(said["log"]) == (falls_back and rank == 0)
            assert all("differ in size" in line and "nodes=None" in line for line in said["log"])
            assert ("to 3 ranks: each rank sends codes to all others" in said["text"]) == falls_back


def test_groups_of_nodes_are_made_when_they_are_needed_and_used_again(four: Scenes) -> None:
    for found in value(four, "comes by nodes"):
        assert found["groups"] == [0, 2, 2, 2, 2]
        assert found["texts"] == [True, True, True]


@pytest.mark.parametrize("recipe", ["int4", pytest.param("int8", marks=pytest.mark.rest)])
def test_evaluations_between_steps_change_nothing(two: Scenes, recipe: str) -> None:
    assert value(two, f"evaluated, {recipe}") == [{"same": True, "step": 5}] * 2


@pytest.mark.parametrize("recipe", ["int4", pytest.param("int8", marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", ["bfloat16", pytest.param("float32", marks=pytest.mark.rest)])
def test_norms_of_gradients_are_those_of_stock_fsdp2(two: Scenes, name: str, recipe: str) -> None:
    for found in value(two, f"norms, {recipe}, {name}"):
        ours, stock = found["losses"]
        # int4 is off by a tenth of the norm of normal numbers, at right angles to them for the most part.
        assert ours[0] == pytest.approx(stock[0], rel=0.05)
        assert all(norm > 0.1 * stock[0] for norm in ours)


def test_adapters_in_turn_are_refused_before_anything_is_sent(two: Scenes) -> None:
    for found in value(two, "in turn"):
        assert "were frozen or thawed after attach" in found["said"]
        assert "int4(feedback=False)" in found["said"]
        assert (found["sent"], found["step"]) == (0, 4)


def test_freezing_a_parameter_after_attach_is_refused_where_something_is_unsent(two: Scenes) -> None:
    for found in value(two, "thawed"):
        assert found["int8"] == ""
        assert "were frozen or thawed after attach" in found["int4"]


def test_torch_makes_no_copy_that_could_keep_a_wire(two: Scenes) -> None:
    for found in value(two, "copied"):
        *ours, deep, pickled = found["deep"]
        assert ours == [deep, pickled]
        assert "does not support deepcopy" in deep
        assert pickled
        assert found["same"], "a shallow copy is the same model"
        assert found["step"] == 6


def test_a_gather_on_its_way_is_none_of_what_exact_begins_or_ends(two: Scenes) -> None:
    assert value(two, "exactly, though asked before") == [{"exact": [True, False]}] * 2


@pytest.mark.parametrize("recipe", ["int4", pytest.param("dense", marks=pytest.mark.rest)])
def test_modules_that_share_a_collective_and_a_group_for_scatters(two: Scenes, recipe: str) -> None:
    for found in value(two, f"grouped, {recipe}"):
        ours, stock = found["losses"]
        assert found["alike"]
        assert (found["off"] == 0.0) == (recipe == "dense")
        assert abs(ours[-1] - stock[-1]) < 0.1 * stock[0]
        plain = [["float32"], ["float32"], 4]
        assert found["kinds"] == (plain if recipe == "dense" else [["int8"], ["int4"], 4])


def test_a_state_goes_on_under_another_recipe(two: Scenes) -> None:
    for found in value(two, "loaded into dense"):
        assert found["off"] < 5e-6
        assert "other parameters, such as 'other'" in found["strange"]
        assert "missing='ignore' is neither" in found["ignored"]
        assert found["warned"]


@pytest.mark.rest
@pytest.mark.parametrize("scene", ["int8, recomputing, reentrant", "int8, sent_twice"])
def test_bytes_are_counted_per_pass_however_often_a_pass_is_entered(two: Scenes, scene: str) -> None:
    plain = value(two, "int8, plain")
    for found, other in zip(value(two, scene), plain, strict=True):
        assert found["bytes"][1] == other["bytes"][1]
