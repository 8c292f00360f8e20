"""What `gradwire.plan` says, from numbers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gradwire
from gradwire._api.plan import CANDIDATES
from gradwire._api.study import BETWEEN_ROUNDS, profile_of
from gradwire.planning.choice import LATE
from gradwire.planning.collectives import HOP_S
from gradwire.planning.costs import ENOUGH, CodecCost, Cores, Line
from gradwire.planning.shapes import load
from gradwire.recipes import recipe
from gradwire.recipes.auto import CANDIDATES as CHOICES
from gradwire.recipes.auto import may_be_within

SLOW: dict[str, Any] = {"workers": 4, "rate_bit_per_s": 1e9, "delay_s": 1e-4, "step_s": 0.18}
FAST: dict[str, Any] = {**SLOW, "rate_bit_per_s": 100e9, "delay_s": 1e-6}
NODES: dict[str, Any] = {**SLOW, "workers": 32, "per_node": 8, "inside_bit_per_s": 200e9}
FEW = ("dense", "bf16", "int8", "topk(ratio=0.01)")


def test_the_same_numbers_give_the_same_plan_with_every_candidate_once() -> None:
    plan = gradwire.plan("resnet50", **SLOW)
    assert plan == gradwire.plan(load("resnet50"), **SLOW)
    assert sorted(each.recipe for each in plan.candidates) == sorted(CANDIDATES)


def test_the_first_takes_the_least_time_and_the_fastest_is_one_that_auto_tries() -> None:
    plan = gradwire.plan("bert_base", **SLOW)
    assert plan.candidates[0].step_s == min(each.step_s for each in plan.candidates)
    assert plan.fastest.step_s == min(each.step_s for each in plan.candidates if each.tried)
    assert plan.fastest.tried
    assert not plan.candidates[0].tried, "it leaves more of the gradient late"
    within = {text for text, assumed in CHOICES.items() if may_be_within(LATE, assumed)}
    assert {each.recipe for each in plan.candidates if each.tried} == {"dense", *within}


def test_the_headline_names_what_auto_would_take() -> None:
    plan = gradwire.plan("resnet50", **SLOW)
    [named] = re.findall(r"with ([^,]+), [\d.]+ times", plan.advice)
    assert recipe(named).build().text == plan.auto
    assert "auto is expected to choose int4: " in str(plan)
    assert re.search(r"^int4 .* 0.18 +tries$", str(plan), re.MULTILINE)
    assert re.search(r"^topk\(ratio=0.1\) .* [kMG]B +1.2$", str(plan), re.MULTILINE)


def test_what_auto_tries_stands_above_what_is_faster_and_leaves_more_late() -> None:
    plan = gradwire.plan("resnet50", **SLOW)
    rows = str(plan).partition("\nrecipe ")[2].splitlines()[1:]
    marks = [row.endswith("tries") for row in rows if re.search("[kMG]B| B", row)]
    assert marks == sorted(marks, reverse=True)
    assert len(set(marks)) == 2
    late = {each.recipe: each.assumed_late for each in plan.candidates}
    assert {text: late[text] for text in CHOICES if text in late} == {
        text: assumed for text, assumed in CHOICES.items() if text in late
    }
    assert (late["dense"], late["leader_topk(ratio=0.001)"]) == (0.0, 26.0)


def test_plan_auto_and_advise_have_the_same_recipes_and_the_same_first_one() -> None:
    """GPT-2 over 1 Gbit/s on two ranks, where four bits are gathered."""
    plan = gradwire.plan("gpt2", workers=2, rate_bit_per_s=1e9, delay_s=1e-4, step_s=0.4)
    assert recipe(plan.fastest.recipe).build().text == plan.auto


def test_do_not_bother_where_ccr_is_below_one() -> None:
    plan = gradwire.plan("resnet50", **FAST)
    assert plan.ccr < 1.0
    assert not plan.worthwhile
    assert plan.advice.startswith("do not bother: an all-reduce takes less than the backward pass")
    assert plan.auto == "dense"
    just = gradwire.plan("bert_base", **{**SLOW, "rate_bit_per_s": 50e9, "delay_s": 0.0})
    assert 0.8 < just.ccr < 1.0
    assert just.fastest.step_s < 0.95 * just.dense_s, "embeddings are ready last, and nothing hides them"
    assert not just.worthwhile
    assert just.auto != "dense"
    assert just.advice.startswith("little to gain: "), "or it would contradict what auto does"


def test_a_choice_that_is_not_the_fastest_says_why() -> None:
    """Four bits are the fastest; where codecs are free, frames that lose nothing reach the target, too."""
    plan = gradwire.plan("resnet50", workers=8, rate_bit_per_s=1e10, step_s=0.18)
    assert plan.fastest.recipe == "int4"
    assert recipe(plan.auto).name == "gcomp"
    assert plan.why.endswith("; int4 is faster, and leaves more of the gradient unsent")
    slow = gradwire.plan("resnet50", workers=8, rate_bit_per_s=1e9, step_s=0.18)
    assert recipe(slow.auto).name == "int4"
    assert slow.why.endswith("without communication)")


def test_do_not_bother_where_nothing_beats_dense() -> None:
    """All latency: every recipe has at least as many rounds as dense, and none in fewer units."""
    plan = gradwire.plan("resnet18", **{**SLOW, "rate_bit_per_s": 1e15, "delay_s": 0.1}, candidates=FEW[:3])
    assert plan.ccr > 1.0
    assert not plan.worthwhile
    assert "nothing that auto tries is predicted to be faster" in plan.advice


def test_on_a_slow_link_it_is_worth_trying_and_auto_would_compress() -> None:
    plan = gradwire.plan("resnet50", **SLOW)
    assert plan.worthwhile
    assert recipe(plan.auto).name != "dense"
    [(step_ms, name, gain)] = re.findall(
        r"worth trying: a step falls from .* to (\d+) ms with (.+), (.+) times", plan.advice
    )
    assert recipe(name).build().text == plan.auto, "what would run, and not what is fastest"
    assert float(gain) == pytest.approx(1e3 * plan.dense_s / float(step_ms), abs=0.1)
    assert name != min(plan.candidates, key=lambda each: each.step_s).recipe
    assert plan.dense_s > plan.fastest.step_s > plan.compute_s


def test_ccr_is_the_rings_time_over_that_of_the_backward_pass() -> None:
    plan = gradwire.plan("vgg16", **{**SLOW, "delay_s": 0.0}, backward_s=0.1)
    sent_s = 2 * 3 / 4 * 4 * load("vgg16").parameters * 8e-9
    assert plan.ccr == pytest.approx(sent_s / 0.1, rel=1e-12)


@pytest.mark.parametrize("model", ["resnet18", "gpt2"])
def test_a_better_link_never_makes_a_candidate_slower(model: str) -> None:
    slow = {each.recipe: each.step_s for each in gradwire.plan(model, **SLOW).candidates}
    fast = {each.recipe: each.step_s for each in gradwire.plan(model, **FAST).candidates}
    assert all(fast[text] <= slow[text] for text in slow)


def test_codecs_that_are_stated_count_and_are_marked() -> None:
    dear = {"int8": CodecCost(Line(0.0, 1e-8), Line(0.0, 1e-8))}
    free, stated = (gradwire.plan("resnet50", **SLOW, candidates=FEW, codecs=each) for each in (None, dear))
    steps = [{each.recipe: each for each in plan.candidates} for plan in (free, stated)]
    assert steps[1]["int8"].step_s > steps[0]["int8"].step_s
    assert [each.codec for each in stated.candidates if each.recipe == "int8"] == ["stated"]
    assert {each.codec for each in free.candidates} == {"free"}
    assert steps[0]["bf16"] == steps[1]["bf16"]


def test_two_levels_are_predicted_and_recommended_where_ranks_share_nodes() -> None:
    two = [each for each in gradwire.plan("resnet50", **NODES).candidates if each.two_levels]
    assert {each.recipe for each in two} == set(CANDIDATES)
    plan = gradwire.plan("resnet50", **NODES, candidates=FEW)  # the smallest choices gain nothing
    assert plan.fastest.two_levels
    assert plan.fastest.step_s == min(each.step_s for each in plan.candidates if each.tried)
    assert "attach(nodes=…)" in str(plan)
    assert " hierarchically, " in plan.advice
    assert not [each for each in gradwire.plan("resnet50", **SLOW).candidates if each.two_levels]


def test_a_module_is_read_for_its_shapes_without_those_that_are_frozen() -> None:
    module = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 10))
    module[1].weight.requires_grad = False
    assert profile_of(module).parameters == 300 * 200 + 200 + 10
    assert gradwire.plan(module, **SLOW, candidates=FEW).model == "Sequential"


def test_it_says_that_it_is_a_prediction() -> None:
    plan = gradwire.plan("resnet50", **SLOW)
    assert str(plan).startswith("predicted, not measured")
    assert "* near-lossless frames" in str(plan)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal_and_cuts_no_number(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plan = gradwire.plan("resnet50", **NODES)
    told = str(plan).splitlines()
    assert max(map(len, told)) <= width
    for each in plan.candidates:
        assert any(f" {each.step_s * 1e3:.0f} ms " in line for line in told)


def test_codecs_have_a_column_where_some_are_known() -> None:
    free = gradwire.plan("resnet50", **SLOW, candidates=FEW)
    assert "taken as free" in " ".join(str(free).split())
    assert " codec" not in str(free).split("recipe", 1)[1].splitlines()[0]
    known = {"int8": CodecCost(Line(0.0, 1e-9), Line(0.0, 1e-9))}
    some = str(gradwire.plan("resnet50", **SLOW, candidates=FEW, codecs=known))
    assert " codec" in some.split("recipe   ", 1)[1].splitlines()[0]
    assert "taken as free" not in some


def test_cores_that_compute_take_longer() -> None:
    free, full = (
        gradwire.plan("resnet50", workers=4, rate_bit_per_s=1e9, step_s=0.18, cores=cores)
        for cores in (ENOUGH, Cores(0.5, 0.5))
    )
    assert full.dense_s >= free.dense_s
    assert {row.recipe: row.step_s for row in full.candidates}["int4"] > {
        row.recipe: row.step_s for row in free.candidates
    }["int4"]


def test_rows_are_told_as_they_come() -> None:
    told: list[tuple[str, float]] = []
    plan = gradwire.plan(
        "resnet50", **NODES, candidates=FEW, told=lambda row, share: told.append((row, share))
    )
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert len(told) == len(plan.candidates) + len(CHOICES)
    first = next(each for each in plan.candidates if each.recipe == FEW[0] and not each.two_levels)
    assert told[0][0] == f"dense: {first.step_s * 1e3:.0f} ms"


def test_what_is_assumed_is_not_shown_as_measured() -> None:
    plan = gradwire.plan("resnet50", **SLOW)
    assert "residual: norm of the unsent gradient, as a share of the norm of one step's; assumed" in " ".join(
        str(plan).split()
    )
    assert str(plan).count("CCR") == 1
    assert not re.search("kept|keeps|recorded", str(plan))


def test_auto_is_expected_to_stay_within_its_limit_and_the_plan_says_what_more_would_gain() -> None:
    few_bits = gradwire.plan("resnet50", **SLOW)
    assert recipe(few_bits.auto).name in {"int4", "int8"}
    dear = CodecCost(Line(1.0, 0.0), Line(1.0, 0.0))
    dearer = gradwire.plan(
        "resnet50", **SLOW, codecs={text: dear for text, late in CHOICES.items() if late <= 2 * LATE}
    )
    assert dearer.auto == "dense"
    assert "; auto(late=" in dearer.why
    assert dearer.advice.startswith("auto should stay with dense, ")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"workers": 1}, "single rank"),
        ({"rate_bit_per_s": 0.0}, "positive rate"),
        ({"delay_s": -1.0}, "positive rate"),
        ({"backward_s": 0.2}, "within step_s"),
        ({"target": 0.0}, "target"),
        ({"candidates": ["auto"]}, "must measure"),
        ({"candidates": []}, "nothing to compare"),
        ({"per_node": 3}, "do not fill"),
        ({"per_node": 2}, "link inside"),
        ({"every": 0}, "every=0"),
        ({"every": 2, "per_node": 2, "inside_bit_per_s": 1e10}, "each worker is a replica"),
    ],
)
def test_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gradwire.plan("resnet50", **{**SLOW, **changed})


def test_a_round_is_shared_by_the_local_steps_before_it_and_hides_behind_nothing() -> None:
    far: dict[str, Any] = {"workers": 2, "rate_bit_per_s": 1e8, "delay_s": 0.05, "step_s": 0.5}
    at_the_end = gradwire.plan("gpt2", **far, overlap=False, candidates=BETWEEN_ROUNDS)
    found = gradwire.plan("gpt2", **far, every=30)
    once = {each.recipe: each for each in at_the_end.candidates}
    assert sorted(once) == sorted(each.recipe for each in found.candidates)
    for each in found.candidates:
        same = once[each.recipe]
        # In a round there are 2 units instead of 22. The last latency of a unit passes beside the next unit.
        # So few units gain little where a unit has one round, and lose a little where it has several.
        assert same.step_s - 0.5 - 21 * HOP_S <= each.exposed_s <= 1.011 * (same.step_s - 0.5)
        assert each.step_s == pytest.approx(0.5 + each.exposed_s / 30, rel=1e-9)
        assert each.wire_bytes == pytest.approx(same.wire_bytes, rel=0.01)  # of padding
        # A day has 86,400 s / (30 steps) rounds.
        assert each.day_bytes == pytest.approx(each.wire_bytes * 86_400 / (30 * each.step_s), rel=1e-9)
    exposed = {each.recipe: once[each.recipe].step_s - 0.5 - each.exposed_s for each in found.candidates}
    assert exposed["dense"] == pytest.approx(0.0, abs=1e-9)
    of_20_units_s = 20 * HOP_S
    assert exposed["sparseloco"] == pytest.approx(of_20_units_s, rel=0.01)
    assert found.dense_s == gradwire.plan("gpt2", **far, candidates=["dense"]).dense_s, (
        "of an exchange a step"
    )


GUIDE = Path(__file__).parents[3] / "docs" / "choosing.md"


def test_the_guides_table_is_what_is_predicted() -> None:
    lines = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if " MB |" in line]
    texts = [line.split("`")[1] for line in lines]
    numbers: dict[str, Any] = {"rate_bit_per_s": 1e9, "delay_s": 1e-4, "step_s": 0.18, "candidates": texts}
    plans = [gradwire.plan("resnet50", workers=world, **numbers) for world in (4, 8, 32)]
    rows = [{each.recipe: each for each in plan.candidates} for plan in plans]
    for text, line in zip(texts, lines, strict=True):
        cells = [f"{row[text].step_s * 1e3:.0f} ms, {row[text].wire_bytes / 1e6:.3g} MB" for row in rows]
        assert line == f"| `{text}` | {' | '.join(cells)} |"
    assert len(texts) > 5


def test_the_advice_counts_what_auto_would_cut_otherwise() -> None:
    """Over 2.4 ms each unit more costs its rounds: no recipe that cuts by itself is as fast."""
    found = gradwire.plan("resnet50", workers=32, rate_bit_per_s=1e10, delay_s=2.4e-3, step_s=0.18)
    assert found.auto.startswith("mergecomp(")
    [takes_ms] = re.findall(r" to (\d+) ms with \S+ in fewer units", found.advice)
    assert float(takes_ms) < 850 * found.fastest.step_s
