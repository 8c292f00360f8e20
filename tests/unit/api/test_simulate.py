"""What `gradwire.simulate` says, from numbers alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

import gradwire
from gradwire._api.simulate import GROWS, MORE, NO_FIT, Simulated, fixed_recipes
from gradwire.planning.costs import CodecCost, Line

LINK: dict[str, Any] = {"rate_bit_per_s": 1e10, "delay_s": 2e-5, "step_s": 0.18}
FEW = ("dense", "int8", "leader_topk(ratio=0.01)", "topk(ratio=0.01)")


def outcomes(**changed: Any) -> dict[tuple[str, int], Simulated]:
    found = gradwire.simulate("resnet50", **{**LINK, "workers": (4, 64, 1024), "candidates": FEW, **changed})
    return {(each.recipe, each.workers): each for each in found.outcomes}


def test_a_world_is_what_a_plan_of_it_says() -> None:
    plan = gradwire.plan("resnet50", **LINK, workers=64, candidates=FEW)
    found = outcomes()
    for each in plan.candidates:
        same = found[each.recipe, 64]
        assert (same.step_s, same.efficiency) == (each.step_s, each.share_of_linear)
        assert (same.wire_bytes, same.memory_bytes) == (each.wire_bytes, each.memory_bytes)


def test_rounds_of_local_steps_are_those_of_a_plan_and_wait_less_for_late_ranks() -> None:
    plan = gradwire.plan("resnet50", **LINK, workers=64, every=30, candidates=FEW)
    found = outcomes(every=30)
    for each in plan.candidates:
        same = found[each.recipe, 64]
        assert (same.step_s, same.exposed_s, same.day_bytes) == (each.step_s, each.exposed_s, each.day_bytes)
    alone = [
        gradwire.simulate("resnet50", **LINK, workers=[64], stragglers=0.1, every=n).alone for n in (1, 30)
    ]
    assert alone[0] < alone[1]


def test_more_workers_are_never_more_efficient() -> None:
    found = outcomes(workers=(2, 8, 32, 128, 512), stragglers=0.1)
    for text in FEW:
        shares = [each.efficiency for (recipe, _), each in found.items() if recipe == text]
        assert shares == sorted(shares, reverse=True)


def test_late_ranks_are_drawn_by_seed_and_bound_what_a_recipe_can_reach() -> None:
    late = {"stragglers": 0.1, "workers": (4, 64), "candidates": FEW}
    found = gradwire.simulate("resnet50", **LINK, **late)
    assert found == gradwire.simulate("resnet50", **LINK, **late)
    assert found.outcomes != gradwire.simulate("resnet50", **LINK, **late, seed=1).outcomes
    for each in found.outcomes:
        assert each.efficiency < found.alone[found.workers.index(each.workers)] < 1.0
    assert gradwire.simulate("resnet50", **LINK, workers=[4], candidates=FEW).alone == (1.0,)


def test_what_grows_with_the_ranks_is_flagged_and_what_an_all_reduce_does_is_not() -> None:
    found = outcomes()
    assert GROWS in found["topk(ratio=0.01)", 64].warnings
    assert MORE in found["topk(ratio=0.01)", 1024].warnings
    for text in FEW[:3]:
        assert not found[text, 64].warnings
        assert not found[text, 1024].warnings


def test_the_table_marks_those_that_are_flagged_and_no_others() -> None:
    memory_bytes = outcomes()["topk(ratio=0.01)", 1024].memory_bytes - 1
    setting = {**LINK, "workers": (4, 64, 256, 1024), "candidates": FEW, "memory_bytes": memory_bytes}
    said = str(gradwire.simulate("resnet50", **setting)).splitlines()
    rows = dict(row.split(maxsplit=1) for row in said if row.startswith(FEW))
    marks = {text: re.findall(r"\d([!+^]?)(?= |$)", row)[1:] for text, row in rows.items()}  # without "late"
    assert marks == {text: [""] * 4 for text in FEW[:3]} | {FEW[3]: ["^", "^", "+", "!"]}


def test_a_gather_that_does_not_fit_is_flagged_from_there_on() -> None:
    at_1024 = outcomes()["topk(ratio=0.01)", 1024].memory_bytes
    found = outcomes(memory_bytes=at_1024 - 1)
    assert NO_FIT in found["topk(ratio=0.01)", 1024].warnings
    assert NO_FIT not in found["topk(ratio=0.01)", 64].warnings
    assert NO_FIT not in outcomes(memory_bytes=at_1024)["topk(ratio=0.01)", 1024].warnings


def test_worlds_of_up_to_a_node_stay_inside() -> None:
    nodes = outcomes(workers=(4, 64), per_node=8, inside_bit_per_s=1e13, inside_delay_s=0.0)
    # 0.1 GB at 10 Tbit/s are 0.1 ms of 180: all hidden but a few units' ends.
    assert nodes["dense", 4].efficiency > 0.999


def test_where_ranks_share_nodes_the_nodes_link_decides_levels_and_flags() -> None:
    """Bytes per parameter over a node's link, of eight nodes of eight: `docs/gpus.md` has the same."""
    inside = {"per_node": 8, "inside_bit_per_s": 1e13, "inside_delay_s": 0.0}
    found = outcomes(workers=(16, 64, 256), **inside)
    numel = gradwire.simulate("resnet50", **LINK, workers=[4], candidates=["dense"]).parameters
    assert found["dense", 64].node_bytes / numel == pytest.approx(4 * 2 * 7 / 8, rel=0.01)
    # A scale for each block of codes, and small tensors in float32, come on top.
    assert found["int8", 64].node_bytes / numel == pytest.approx(2 * 7 / 8, rel=0.04)
    assert [found["dense", world].two_levels for world in (16, 64, 256)] == [True, True, False]
    assert all(found["int8", world].two_levels for world in (16, 64, 256))
    assert not any(found[text, world].warnings for text in FEW[:3] for world in (16, 64, 256))
    assert GROWS in found["topk(ratio=0.01)", 256].warnings
    assert found["int8", 64].efficiency > outcomes()["int8", 64].efficiency


def test_codecs_that_are_stated_count() -> None:
    dear = {"int8": CodecCost(Line(0.0, 1e-8), Line(0.0, 1e-8))}
    assert outcomes(codecs=dear)["int8", 4].step_s > outcomes()["int8", 4].step_s
    assert outcomes(codecs=dear)["int8", 4].codec == "stated"


def test_all_recipes_that_need_not_measure_are_there() -> None:
    found = gradwire.simulate("resnet18", **LINK, workers=[4])
    assert {each.recipe for each in found.outcomes} == set(fixed_recipes())
    assert {"dense", "gcomp", "powersgd", "qsgd", "covap(interval=4)"} < set(fixed_recipes())
    assert not {"auto", "flexible", "mergecomp", "covap"} & set(fixed_recipes())
    assert str(found).startswith("predicted, not measured")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"workers": ()}, "from 2 on"),
        ({"workers": (1, 2)}, "from 2 on"),
        ({"per_node": 3, "inside_bit_per_s": 1e11}, "do not fill"),
        ({"stragglers": -1.0}, "stragglers=-1.0 is outside"),
        ({"candidates": ["mergecomp"]}, "must measure"),
    ],
)
def test_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        outcomes(**changed)
