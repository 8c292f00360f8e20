"""Predictions of FSDP2's own traffic."""

from __future__ import annotations

import pytest

import gradwire
from gradwire._api.plan_fsdp import CANDIDATES

SLOW = {"rate_bit_per_s": 2e8, "step_s": 0.5}


def _rows(workers: int = 4, **how: object) -> dict[str, gradwire._api.plan.Candidate]:  # type: ignore[name-defined]
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


def test_memory_is_that_of_the_whole_model_and_comes_first() -> None:
    rows = _rows()
    assert rows["int4+int8"].memory_bytes == 8 * 25_557_032
    assert all(rows[each].memory_bytes == 0 for each in CANDIDATES if each != "int4+int8")
    text = str(gradwire.plan("resnet50", workers=4, sharded=True, **SLOW))
    assert "int4 remembers a gradient of the whole model on every rank: 204 MB" in text.split("\n")[1]
    assert "auto does not choose among these yet" in text


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
    for how in ({"every": 10}, {"per_node": 2, "inside_bit_per_s": 1e10}):
        with pytest.raises(ValueError, match="sharded=True is about"):
            _rows(**how)
    with pytest.raises(ValueError, match="after the plus stands bf16 or int8"):
        _rows(candidates=["int8+int4"])
    with pytest.raises(ValueError, match="not for FSDP2's own scatters"):
        _rows(candidates=["topk"])


def test_a_simulation_has_the_rows_of_the_plan() -> None:
    found = gradwire.simulate("resnet50", workers=(4, 64), sharded=True, **SLOW)
    four = {each.recipe: each for each in found.outcomes if each.workers == 4}
    rows = _rows()
    assert four.keys() == rows.keys()
    assert all(four[each].step_s == pytest.approx(rows[each].step_s) for each in rows)
    late = gradwire.simulate("resnet50", workers=(4,), sharded=True, stragglers=0.5, **SLOW)
    assert all(each.efficiency < four[each.recipe].efficiency for each in late.outcomes)
