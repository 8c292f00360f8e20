"""Which recipe is chosen, from numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.decide.choice import LATE, LEAD, MOST_EXAMINED, Option, Standing, margin_of, shortlist

Setting = tuple[float, float, dict[str, tuple[float, float]]]
"""Milliseconds of a step without communication and of a dense one; each recipe's, and how late it is."""

# As measured on two cores. On convnet the leader's choice counts with what was predicted of it.
RESNET18: Setting = (
    462.0,
    1968.0,
    {
        "int4": (587.0, 0.18),
        "topk(ratio=0.01)": (505.0, 5.0),
        "powersgd(rank=2)": (492.0, 2.8),
        "covap": (525.0, 1.4),
    },
)
CHARGPT4: Setting = (
    201.0,
    789.0,
    {"int4": (308.0, 0.18), "leader_topk": (315.0, 6.5), "powersgd(rank=1)": (287.0, 4.0)},
)
CHARGPT2: Setting = (
    89.0,
    948.0,
    {"topk": (180.0, 5.0), "covap": (168.0, 1.4), "powersgd(rank=2)": (183.0, 2.8)},
)
CONVNET: Setting = (
    35.0,
    88.0,
    {"leader_topk": (161.0, 6.5), "int4": (59.0, 0.18), "topk(ratio=0.01)": (44.0, 5.0)},
)


def _standing(setting: Setting, **asked: float) -> Standing:
    compute_ms, dense_ms, recipes = setting
    options = [Option(text, text, ms / 1e3, 0.01, 1e6, late) for text, (ms, late) in recipes.items()]
    return Standing(tuple(options), 0.0, compute_ms / 1e3, dense_ms / 1e3, 4e6, **asked)


def _best(standing: Standing) -> str:
    best = standing.best()
    return "dense" if best is None else best.recipe


@pytest.mark.parametrize("setting", [RESNET18, CHARGPT4, CHARGPT2, CONVNET])
def test_nothing_runs_that_is_predicted_to_be_slower_than_dense(
    setting: Setting,
) -> None:
    standing = _standing(setting)
    best = standing.best()
    assert best is not None
    assert best.predicted_s < (1 - LEAD) * standing.dense_s
    slow = replace(
        standing, options=tuple(replace(each, predicted_s=standing.dense_s) for each in standing.options)
    )
    assert slow.best() is None


def test_of_equal_speed_the_mildest_runs() -> None:
    options = {"leader_topk": (59.0, 6.5), "int4": (61.0, 0.18)}
    assert _best(_standing((35.0, 88.0, options))) == "int4"
    assert _best(_standing((35.0, 88.0, options | {"leader_topk": (57.0, 6.5)}))) == "leader_topk"


def test_where_some_reach_the_target_the_mildest_runs_and_not_the_fastest() -> None:
    assert _best(_standing(RESNET18, target=0.9)) == "powersgd(rank=2)"
    assert _best(_standing(RESNET18, target=0.78)) == "int4"
    assert _best(_standing(CHARGPT4, target=0.65)) == "int4"


def test_where_none_reaches_it_the_fastest_runs() -> None:
    assert _best(_standing(RESNET18)) == "powersgd(rank=2)"
    assert _best(_standing(CHARGPT4)) == "powersgd(rank=1)"
    assert _best(_standing(CHARGPT2)) == "covap"


def test_what_was_measured_below_the_floor_does_not_run() -> None:
    standing = _standing(RESNET18, floor=0.7)
    poor = {"powersgd(rank=2)": 0.69, "topk(ratio=0.01)": 0.5, "covap": 0.7}
    options = [replace(each, fidelity=poor.get(each.recipe)) for each in standing.options]
    assert _best(replace(standing, options=tuple(options))) == "covap"


def test_recipes_beyond_the_limit_do_not_run_and_are_offered_as_one_would_be_chosen() -> None:
    standing = _standing(RESNET18, target=0.78)
    within, *later = standing.options
    limited = replace(standing, options=(within,), later=tuple(later))
    assert _best(limited) == "int4"
    assert _best(replace(limited, options=())) == "dense"
    assert limited.offer().startswith("; auto(late=1.4) may run covap: 525 ms at best")
    assert replace(limited, dense_s=0.5).offer() == ""


def test_dense_stays_where_it_hides_and_where_others_are_faster_only_within_noise() -> None:
    assert _best(_standing((84.0, 88.0, {"int8": (40.0, 0.01)}))) == "dense"
    just = {"int8": (88.0 * 0.93, 0.01)}
    assert _best(_standing((35.0, 88.0, just))) == "int8"
    assert _best(_standing((35.0, 88.0, just), margin=margin_of(0.08, 9))) == "dense"


def test_a_trial_counts_with_what_it_took_and_corrects_the_others_by_their_work() -> None:
    """Codecs and calls of 10 ms took 40 ms instead, 20 ms of others will take 80."""
    standing = _standing((35.0, 200.0, {"a": (50.0, 0.1), "b": (60.0, 0.2), "c": (60.0, 0.2)}))
    first, second, third = standing.options
    known = replace(standing, options=(first, replace(second, work_s=0.02), replace(third, work_s=0.0)))
    after = known.after_trial("a", 0.08)
    assert [after.expected_s(each) for each in after.options] == pytest.approx([0.08, 0.12, 0.06], rel=1e-12)
    assert known.load == 0.0
    assert after.load == pytest.approx(3.0, rel=1e-12)
    assert _best(known) == "a"
    assert _best(after) == "c"


def test_steps_that_are_faster_than_predicted_make_no_other_recipe_faster() -> None:
    after = _standing((35.0, 200.0, {"a": (50.0, 0.1), "b": (60.0, 0.2)})).after_trial("a", 0.04)
    assert after.load == 0.0
    assert after.expected_s(after.option("b")) == 0.06


def test_after_the_last_trial_only_what_was_tried_may_run() -> None:
    before = _standing(CONVNET)
    free = tuple(replace(each, work_s=0.0) for each in before.options)
    standing = replace(before, options=free).after_trial("topk(ratio=0.01)", 0.080)
    assert _best(standing) == "int4"
    assert standing.best(tried_only=True) == standing.option("topk(ratio=0.01)")
    assert standing.after_trial("topk(ratio=0.01)", 0.088).best(tried_only=True) is None


def test_the_table_says_of_each_why_it_does_not_run() -> None:
    whole = _standing(CONVNET, floor=0.7)
    kept = {"topk(ratio=0.01)": 0.6, "int4": 0.96}
    options = tuple(replace(each, fidelity=kept.get(each.recipe)) for each in whole.options)
    standing = replace(whole, options=options)
    rows = {row.recipe: row for row in standing.table("int4")}
    assert [row.recipe for row in standing.table("int4")] == [
        "topk(ratio=0.01)",
        "int4",
        "dense",
        "leader_topk",
    ]
    assert {name: row.verdict for name, row in rows.items()} == {
        "topk(ratio=0.01)": "fidelity below 0.7",
        "int4": "runs",
        "dense": "slower",
        "leader_topk": "not faster than dense",
    }
    assert rows["dense"].measured_step_s == standing.dense_s
    assert rows["int4"].measured_step_s is None
    assert [rows[name].fidelity for name in ("int4", "leader_topk")] == [0.96, None]
    assert rows["int4"].share_of_linear == pytest.approx(35 / 59, rel=1e-12)
    tried = standing.after_trial("int4", 0.07).table("int4")
    assert [(row.predicted_step_s, row.measured_step_s) for row in tried if row.verdict == "runs"] == [
        (0.059, 0.07)
    ]


def test_of_each_family_those_around_the_target_are_examined_and_the_most_promising_first() -> None:
    mild = {f"m{n}": (100.0 - 10 * n, 1.0 + n) for n in range(7)}
    strong = {f"s{n}": (45.0 - n, 10.0 + n) for n in range(3)}
    slow = {"slow": (120.0, 0.0)}
    standing = _standing((40.0, 110.0, mild | strong | slow), target=0.5)
    families = [tuple(mild), tuple(strong), tuple(slow), ("unknown",)]
    # 80 ms reach half of linear.
    assert shortlist(standing, families) == ("m2", "m3", "s0", "s1")
    # None reaches 95 %: the strongest is by far the fastest of its family, and 45, 44 and 43 ms are level.
    assert shortlist(replace(standing, target=0.95), families) == ("m6", "s1", "s0")
    assert shortlist(replace(standing, backward_s=0.109), families) == ()
    assert len(shortlist(standing, [(text,) for text in mild | strong])) == MOST_EXAMINED
    # Of ten, eight are faster.
    options = [replace(each, late=LATE) if each.recipe == "m1" else each for each in standing.options]
    assert (
        shortlist(replace(standing, options=tuple(options)), [(each,) for each in mild | strong])[0] == "m1"
    )
