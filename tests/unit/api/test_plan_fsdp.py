"""Predictions of FSDP2's own traffic."""

from __future__ import annotations

from typing import Any

import pytest

import gradwire
from gradwire._api.plan_fsdp import CANDIDATES, forecast_fsdp
from gradwire._api.study import Candidate
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import Link
from gradwire.planning.shapes import Layer, Profile

SLOW = {"rate_bit_per_s": 2e8, "step_s": 0.5}


def _rows(workers: int = 4, **how: object) -> dict[str, Candidate]:
    found = gradwire.plan("resnet50", workers=workers, sharded=True, **(SLOW | how))  # type: ignore[arg-type]
    return {each.recipe: each for each in found.candidates}


def test_bytes_are_those_of_two_gathers_and_a_scatter() -> None:
    rows = _rows()
    ring = 3 * 3 / 4 * 4 * 25_557_032
    # What torch scatters goes as an all-reduce: twice. Shards are filled up to whole rows.
    assert 4 / 3 * ring <= rows["dense"].wire_bytes < 1.01 * 4 / 3 * ring
    assert ring / 3.95 < rows["int8+int8"].wire_bytes < ring / 3.7
    assert ring / 4.7 < rows["int4+int8"].wire_bytes < ring / 4.4
    assert 0.5 * ring <= rows["bf16+bf16"].wire_bytes < 0.51 * ring


def test_on_gpus_scatters_are_rings_and_only_the_ends_of_a_pass_wait() -> None:
    ring = 3 * 3 / 4 * 4 * 25_557_032
    assert ring <= _rows(gpu=True)["dense"].wire_bytes < 1.01 * ring
    assert _rows(gpu=True)["int8+int8"].wire_bytes == _rows()["int8+int8"].wire_bytes
    # Three equal layers of 10 and 20 ms. Each gather or scatter among two ranks takes half of 262 kB.
    profile = Profile("three", "", (Layer("a", 1, ((256, 256),)),) * 3)
    fast, slow = (
        forecast_fsdp("dense", profile, Cluster(2, Link(0.0, beta_s)), 0.03, 0.06, gpu=True)
        for beta_s in (1e-8, 1e-6)
    )
    # Exposed are the first gather of either pass, and the last scatter.
    assert fast.step_s == pytest.approx(0.09 + 3 * 131_072e-8)
    # Nothing travels while the forward pass computes its last layer.
    assert slow.step_s == pytest.approx(9 * 131_072e-6 + 0.01)
    # The host reads what comes with an exact gather, behind a scatter: of three, only the second hides.
    cluster = Cluster(2, Link(0.0, 1e-7))
    exact = forecast_fsdp("dense+exact", profile, cluster, 0.03, 0.06, gpu=True)
    assert exact.step_s == pytest.approx(0.09 + 2 * 131_072e-7, rel=0.01)


def test_memory_is_that_of_the_whole_model_and_comes_first() -> None:
    rows = _rows()
    assert rows["int4+int8"].memory_bytes == 8 * 25_557_032
    assert all(rows[each].memory_bytes == 0 for each in CANDIDATES if each != "int4+int8")
    text = str(gradwire.plan("resnet50", workers=4, sharded=True, **SLOW))
    assert "int4 remembers a gradient of the whole model on every rank: 204 MB" in text.split("\n")[1]
    assert "auto does not choose among these yet" in text


def test_exact_gathers_send_once_a_step_and_hold_the_model() -> None:
    names = ["int4+exact", "dense+exact", "int4+int8"]
    rows = _rows(candidates=names)
    assert rows["dense+exact"].memory_bytes == 2 * 25_557_032
    assert rows["int4+exact"].memory_bytes == (8 + 2) * 25_557_032
    scattered = rows["int4+int8"].wire_bytes - 2 * 3 / 4 * 25_557_032 * 8.25 / 8
    gathered = rows["int4+exact"].wire_bytes - scattered
    assert gathered == pytest.approx(3 / 4 * 25_557_032 * 2 / 8, rel=0.03)
    text = str(gradwire.plan("resnet50", workers=4, sharded=True, candidates=names, **SLOW))  # type: ignore[arg-type]
    assert "exact gathers hold the whole model on every rank: 256 MB" in text


@pytest.mark.parametrize("per_node", [1, 2])
def test_an_exact_gather_takes_as_many_latencies_as_others(per_node: int) -> None:
    profile = Profile("one", "", (Layer("a", 1, ((256, 256),)),))
    cluster = Cluster(8, Link(1e-3, 0.0), per_node, Link(0.0, 0.0))
    exact, rounded = (
        forecast_fsdp(f"dense+{gather}", profile, cluster, 0.1, 0.2) for gather in ("exact", "bf16")
    )
    assert exact.step_s == pytest.approx(rounded.step_s)


def test_fewer_bits_are_faster_where_links_are_slow_and_nothing_is_gained_where_they_are_fast() -> None:
    rows = _rows()
    times = [rows[each].step_s for each in ("int4+int8", "int8+int8", "bf16+bf16", "dense")]
    assert times == sorted(times)
    fast = gradwire.plan("resnet50", workers=4, sharded=True, rate_bit_per_s=1e13, step_s=0.5)
    assert not fast.worthwhile
    assert gradwire.plan("resnet50", workers=4, sharded=True, **SLOW).worthwhile


def test_a_step_takes_at_least_its_computation_and_its_bytes_alone() -> None:
    for each in _rows().values():
        assert each.step_s >= 0.5
        assert each.step_s <= 0.5 + 8 * each.wire_bytes / 2e8 * 1.001
        assert each.share_of_linear == pytest.approx(0.5 / each.step_s)


def test_what_it_is_not_about_is_refused() -> None:
    with pytest.raises(ValueError, match="sharded=True is about"):
        _rows(every=10)
    with pytest.raises(ValueError, match="sharded=True is about"):
        gradwire.simulate("resnet50", workers=(4,), sharded=True, every=10, **SLOW)
    with pytest.raises(ValueError, match="after the plus stands bf16, int8 or exact"):
        _rows(candidates=["int8+int4"])
    with pytest.raises(ValueError, match="not for FSDP2's own scatters"):
        _rows(candidates=["topk"])


NODES = {"per_node": 8, "inside_bit_per_s": 1e11}


def test_on_nodes_codes_pass_between_places_and_float32_stays_inside() -> None:
    rows = _rows(16, **NODES)
    shard = 25_557_032 / 16
    assert [each for each in rows if not rows[each].two_levels] == ["dense"]
    # Of a ring, one rank sends over the node's link: 15 shards, twice in gathers, and twice in an all-reduce.
    assert rows["dense"].node_bytes == pytest.approx(4 * 15 * 4 * shard, rel=0.02)
    # On two levels, each rank of eight sends one row to the other node, in two gathers and a scatter.
    assert rows["bf16+bf16"].node_bytes == pytest.approx(3 * 8 * 2 * shard, rel=0.02)
    # Scatters among all ranks, as torch makes them, beside coded gathers.
    assert rows["dense+bf16"].node_bytes == pytest.approx((2 * 8 * 2 + 2 * 15 * 4) * shard, rel=0.02)
    # All in all: gathers bring 15 rows, two of them by a neighbour; sums inside take 2 rows to each of 7.
    assert rows["bf16+bf16"].wire_bytes == pytest.approx((2 * 15 * 2 + 7 * 2 * 4 + 2) * shard, rel=0.02)
    alone = _rows(16)
    assert all(alone[each].node_bytes == alone[each].wire_bytes for each in CANDIDATES)
    assert all(_rows(8, **NODES)[each].node_bytes == 0.0 for each in CANDIDATES)


def test_on_nodes_memory_is_a_part_of_the_model_and_the_text_says_so() -> None:
    assert _rows(16, **NODES)["int4+int8"].memory_bytes == 25_557_032
    text = _text(16)
    assert "16 ranks on 2 nodes" in text
    assert "a gradient of 1/8 of the model on every rank: 25.6 MB" in text
    assert "sent: over a node's link" in text
    assert "on 1 node" in _text(8)


def _text(workers: int) -> str:
    """The plan's text without its line breaks, which follow the width of the terminal."""
    plan = gradwire.plan("resnet50", workers=workers, sharded=True, **SLOW, **NODES)  # type: ignore[arg-type]
    return " ".join(str(plan).split())


def test_on_nodes_fewer_bits_are_faster_and_a_fast_link_inside_is_used() -> None:
    rows = _rows(16, **NODES)
    times = [rows[each].step_s for each in ("int4+int8", "int8+int8", "bf16+bf16", "dense")]
    assert times == sorted(times)
    for each in rows.values():
        assert each.step_s >= 0.5
        assert each.step_s <= 0.5 + 8 * each.node_bytes / 2e8 + 8 * each.wire_bytes / 1e11 + 1e-9
    slower = _rows(16, per_node=8, inside_bit_per_s=1e9)
    assert all(slower[each].step_s > rows[each].step_s for each in rows if rows[each].two_levels)


def test_a_simulation_has_the_rows_of_the_plan() -> None:
    found = gradwire.simulate("resnet50", workers=(4, 64), sharded=True, **SLOW)
    four = {each.recipe: each for each in found.outcomes if each.workers == 4}
    rows = _rows()
    assert four.keys() == rows.keys()
    assert all(four[each].step_s == pytest.approx(rows[each].step_s) for each in rows)
    names = [*CANDIDATES, "int4+exact"]
    how: dict[str, Any] = {**SLOW, **NODES, "candidates": names}
    nodes = gradwire.simulate("resnet50", workers=(8, 16), sharded=True, **how)
    for world in (8, 16):
        on = _rows(world, **NODES, candidates=names)
        for outcome in nodes.outcomes:
            if outcome.workers == world:
                each = on[outcome.recipe]
                assert (outcome.node_bytes, outcome.wire_bytes) == (each.node_bytes, each.wire_bytes)
                assert outcome.two_levels == each.two_levels
                assert outcome.memory_bytes == each.memory_bytes
                assert outcome.step_s == pytest.approx(each.step_s)
    late = gradwire.simulate("resnet50", workers=(4,), sharded=True, stragglers=0.5, **SLOW)
    assert all(each.efficiency < four[each.recipe].efficiency for each in late.outcomes)
    assert all(each.exposed_s == four[each.recipe].exposed_s for each in late.outcomes), "as by plan"
