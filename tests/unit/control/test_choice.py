"""Which recipe is tried, and which runs, from numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.control.choice import LEAD, Comparison, Option
from gradwire.planning.change_detection import error_of

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


def _comparison(setting: Setting, **asked: float) -> Comparison:
    """By default the limit is no matter here."""
    compute_ms, dense_ms, recipes = setting
    options = [Option(text, text, ms / 1e3, 1e6, late) for text, (ms, late) in recipes.items()]
    return Comparison(tuple(options), 0.0, compute_ms / 1e3, dense_ms / 1e3, 4e6, **{"limit": 100.0, **asked})


def _tried(setting: Setting, **asked: float) -> Comparison:
    """All recipes have run, and were as predicted and assumed."""
    comparison = _comparison(setting, **asked)
    for each in comparison.options:
        comparison = comparison.after_trial(each.recipe, each.predicted_s, each.assumed)
    return comparison


def _best(comparison: Comparison) -> str:
    best = comparison.best()
    return "dense" if best is None else best.recipe


def _next(comparison: Comparison) -> str:
    following = comparison.next_trial()
    return "none" if following is None else following.recipe


SETTINGS = [RESNET18, CHARGPT4, CHARGPT2, CONVNET]


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_runs_that_has_not_run_on_trial(setting: Setting) -> None:
    comparison = _comparison(setting)
    assert comparison.best() is None
    assert comparison.foreseen() == _comparison(setting).option(_best(_tried(setting)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_runs_that_is_not_faster_than_dense(setting: Setting) -> None:
    comparison = _tried(setting)
    best = comparison.best()
    assert best is not None
    assert best.expected_s < (1 - LEAD) * comparison.dense_s
    slow = replace(
        comparison, options=tuple(replace(each, took_s=comparison.dense_s) for each in comparison.options)
    )
    assert slow.best() is None


def test_of_equal_speed_the_mildest_runs() -> None:
    options = {"leader_topk": (59.0, 6.5), "int4": (61.0, 0.18)}
    assert _best(_tried((35.0, 88.0, options))) == "int4"
    assert _best(_tried((35.0, 88.0, options | {"leader_topk": (57.0, 6.5)}))) == "leader_topk"


def test_where_some_reach_the_target_the_mildest_runs_and_not_the_fastest() -> None:
    assert _best(_tried(RESNET18, target=0.9)) == "powersgd(rank=2)"
    assert _best(_tried(RESNET18, target=0.78)) == "int4"
    assert _best(_tried(CHARGPT4, target=0.65)) == "int4"


def test_where_none_reaches_it_the_fastest_runs() -> None:
    assert _best(_tried(RESNET18)) == "powersgd(rank=2)"
    assert _best(_tried(CHARGPT4)) == "powersgd(rank=1)"
    assert _best(_tried(CHARGPT2)) == "covap"


@pytest.mark.parametrize("setting", [RESNET18, CHARGPT4, CONVNET])
def test_what_was_measured_above_the_limit_does_not_run_however_fast_it_is(setting: Setting) -> None:
    assert _best(_tried(setting, limit=0.3)) == "int4"
    late = _tried(setting, limit=0.3).after_trial("int4", 0.04, 0.31)
    assert _best(late) == "dense"
    assert late.table("dense")[0].verdict == "more than 0.3 steps late"


def test_what_was_assumed_to_be_late_runs_if_it_is_not() -> None:
    comparison = _comparison(CONVNET, limit=0.3)
    assert _best(comparison.after_trial("topk(ratio=0.01)", 0.044, 0.2)) == "topk(ratio=0.01)"


def test_a_lateness_that_still_rises_is_not_settled_on() -> None:
    comparison = _comparison(CONVNET).after_trial("int4", 0.059, 0.1, settled=False)
    assert _best(comparison) == "dense"
    rows = {row.recipe: row for row in comparison.table("dense")}
    assert rows["int4"].verdict == "its lateness still rose"


# Predicted for BERT in small on two ranks at 200 Mbit/s and 5 ms.
BERT: Setting = (
    259.0,
    1427.0,
    {"int4": (505.0, 0.2), "gathered": (522.0, 0.12), "int8": (713.0, 0.012), "fp16": (798.0, 4e-4)},
)


@pytest.mark.parametrize(("share", "following"), [(0.85, "int8"), (1.1, "none")])
def test_where_recipes_take_less_than_predicted_others_promise_as_much_less(
    share: float, following: str
) -> None:
    comparison = _comparison(BERT, limit=0.15).after_trial("gathered", share * 0.522, 0.18)
    assert _next(comparison) == "fp16"
    assert _next(comparison.after_trial("fp16", 0.67, 0.0)) == following


def test_no_prediction_falls_below_the_step_without_communication() -> None:
    options = {"bf16": (400.0, 0.003), "int8": (108.0, 0.01), "int4": (106.0, 0.18)}
    comparison = _comparison((100.0, 600.0, options), limit=0.3, target=1.05)
    assert _next(comparison.after_trial("bf16", 0.3, 0.0)) == "int8"
    faster = comparison.after_trial("bf16", 0.3, 0.0).after_trial("int8", 0.104, 0.01)
    assert _next(faster) == "none"  # 100 ms at best, and not 83


def test_none_is_tried_that_is_assumed_to_be_later_than_one_that_was_too_late() -> None:
    comparison = _comparison(BERT, limit=0.15)
    assert _next(comparison.after_trial("gathered", 0.522, 0.18)) == "fp16"
    assert _next(comparison.after_trial("gathered", 0.522, 0.14, settled=False)) == "int4"
    # The other way round a milder one may be within it.
    assert _next(comparison.after_trial("int4", 0.505, 0.23)) == "gathered"


def test_trials_go_from_mild_to_strong_among_those_that_promise_most() -> None:
    options = {"int8": (80.0, 0.01), "int4": (75.0, 0.18), "fp16": (110.0, 0.0004), "gcomp": (300.0, 0.0)}
    comparison = _comparison((56.0, 185.0, options), limit=0.3)
    assert _next(comparison) == "int8", "within what predictions may be off by"
    comparison = comparison.after_trial("int8", 0.085, 0.01)
    assert _next(comparison) == "int4"
    comparison = comparison.after_trial("int4", 0.080, 0.18)
    assert _next(comparison) == "none", "no other promises more"
    assert _best(comparison) == "int4", "by more than 5 %"
    assert _best(comparison.after_trial("int4", 0.082, 0.18)) == "int8", "level"


def test_a_trial_that_disappoints_makes_others_worth_one() -> None:
    options = {"fp16": (110.0, 0.0004), "int8": (80.0, 0.01)}
    comparison = _comparison((56.0, 185.0, options), limit=0.3)
    assert _next(comparison) == "int8"
    assert _next(comparison.after_trial("int8", 0.130, 0.01)) == "fp16"
    assert _next(comparison.after_trial("int8", 0.112, 0.01)) == "none"


def test_once_the_target_is_reached_nothing_stronger_is_tried() -> None:
    options = {"int8": (70.0, 0.01), "int4": (60.0, 0.18), "fp16": (72.0, 0.0004)}
    comparison = _comparison((56.0, 185.0, options), target=0.75)
    assert _next(comparison) == "fp16", "the mildest of those that reach it"
    assert _next(comparison.after_trial("fp16", 0.072, None)) == "none"
    assert _next(comparison.after_trial("fp16", 0.090, None)) == "int8"


def test_recipes_beyond_the_limit_are_offered_as_one_would_be_chosen() -> None:
    comparison = _tried(RESNET18, target=0.78)
    within, *_ = comparison.options
    later = _comparison(RESNET18).options[1:]
    limited = replace(comparison, options=(within,), later=later, target=0.95)
    assert _best(limited) == "int4"
    assert limited.offer().startswith("; auto(late=4) may run powersgd(rank=2): 492 ms at best")
    assert replace(limited, later=(replace(later[0], predicted_s=0.570),)).offer() == "", "that is level"
    none = replace(limited, options=())
    assert _best(none) == "dense"
    assert none.offer()
    assert replace(none, dense_s=0.5).offer() == ""


def test_dense_stays_where_it_hides_and_where_others_are_faster_only_within_noise() -> None:
    hiding = _comparison((84.0, 88.0, {"int8": (40.0, 0.01)}))
    assert (_next(hiding), _best(hiding)) == ("none", "dense")
    just: Setting = (35.0, 88.0, {"int8": (88.0 * 0.93, 0.01)})
    assert _best(_tried(just)) == "int8"
    assert _best(_tried(just, dense_error_s=0.004)) == "dense"
    assert _next(_comparison(just, dense_error_s=0.004)) == "int8", "a trial has to tell"


def test_a_trial_that_is_clearly_faster_counts_where_dense_steps_vary_by_half() -> None:
    """Its own steps vary less; and in seconds, less than as many of dense. Two standard errors are 35 ms."""
    comparison = _comparison(
        (10.0, 100.0, {"int8": (60.0, 0.01)}), noise=0.5, dense_error_s=0.1 * error_of(0.5, 13)
    )
    faster = comparison.after_trial("int8", 0.06, 0.01, error_s=0.06 * error_of(0.1, 9))
    assert _best(faster) == "int8"
    noisy = comparison.after_trial("int8", 0.06, 0.01, error_s=0.06 * error_of(0.5, 9))
    assert _best(noisy) == "dense"


def test_those_that_differ_by_less_than_their_steps_vary_are_equals() -> None:
    comparison = _comparison((56.0, 185.0, {"fp16": (110.0, 0.0004), "int4": (99.0, 0.18)}))

    def after(error: float) -> str:
        tried = comparison.after_trial("fp16", 0.110, 0.0, error_s=0.110 * error)
        return _best(tried.after_trial("int4", 0.099, 0.18, error_s=0.099 * error))

    assert (after(0.01), after(0.05)) == ("int4", "fp16")


def test_of_two_without_memory_the_one_that_is_assumed_to_err_less_is_the_milder() -> None:
    options = {"fp16": (60.0, 0.0004), "gcomp": (61.0, 0.0)}
    tried = _comparison((35.0, 88.0, options))
    for text, (ms, _late) in options.items():
        tried = tried.after_trial(text, ms / 1e3, 0.0)
    assert _best(tried) == "gcomp"


def test_a_trial_is_clear_where_nothing_hangs_on_its_noise() -> None:
    comparison = _comparison((56.0, 185.0, {"int8": (80.0, 0.01)}), noise=0.02)
    assert comparison.is_clear("int8", [0.085, 0.086, 0.085], 0.01)
    assert not comparison.is_clear("int8", [0.174, 0.177, 0.176], 0.01), "about as fast as dense"


def test_the_table_says_of_each_why_it_does_not_run_and_shows_nothing_that_was_not_measured() -> None:
    comparison = _comparison(CONVNET, limit=0.3)
    comparison = comparison.after_trial("int4", 0.07, 0.17).after_trial("topk(ratio=0.01)", 0.045, 4.2)
    rows = {row.recipe: row for row in comparison.table("int4")}
    assert [row.recipe for row in comparison.table("int4")] == [
        "topk(ratio=0.01)",
        "int4",
        "dense",
        "leader_topk",
    ]
    assert {name: row.verdict for name, row in rows.items()} == {
        "topk(ratio=0.01)": "more than 0.3 steps late",
        "int4": "runs",
        "dense": "slower",
        "leader_topk": "not faster than dense",
    }
    assert rows["dense"].measured_step_s == comparison.dense_s
    assert (rows["int4"].predicted_step_s, rows["int4"].measured_step_s) == (0.059, 0.07)
    assert {name: row.late for name, row in rows.items()} == {
        "topk(ratio=0.01)": 4.2,
        "int4": 0.17,
        "dense": 0.0,
        "leader_topk": None,
    }
    assert rows["leader_topk"].measured_step_s is None
    assert rows["int4"].share_of_linear == pytest.approx(35 / 70, rel=1e-12)
