"""Which recipe is tried, and which runs, from numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.planning.change_detection import error_of
from gradwire.planning.choice import LEAD, Comparison, Option
from tests.support.looped import looped

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


@looped("setting", SETTINGS)
def test_nothing_runs_that_has_not_run_on_trial(setting: Setting) -> None:
    comparison = _comparison(setting)
    assert comparison.best() is None
    assert comparison.foreseen() == _comparison(setting).option(_best(_tried(setting)))


@looped("setting", SETTINGS)
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


@looped("setting", [RESNET18, CHARGPT4, CONVNET])
def test_what_was_measured_above_the_limit_does_not_run_however_fast_it_is(setting: Setting) -> None:
    assert _best(_tried(setting, limit=0.3)) == "int4"
    late = _tried(setting, limit=0.3).after_trial("int4", 0.04, 0.31)
    assert _best(late) == "dense"
    assert late.table("dense")[0].verdict == "residual ratio above 0.3"


def test_what_was_assumed_to_be_late_runs_if_it_is_not() -> None:
    comparison = _comparison(CONVNET, limit=0.3)
    assert _best(comparison.after_trial("topk(ratio=0.01)", 0.044, 0.2)) == "topk(ratio=0.01)"


def test_a_lateness_that_still_rises_is_not_settled_on() -> None:
    comparison = _comparison(CONVNET).after_trial("int4", 0.059, 0.1, settled=False)
    assert _best(comparison) == "dense"
    rows = {row.recipe: row for row in comparison.table("dense")}
    assert rows["int4"].verdict == "its residual still grew"


# Predicted for BERT in small on two ranks at 200 Mbit/s and 5 ms.
BERT: Setting = (
    259.0,
    1427.0,
    {"int4": (505.0, 0.2), "gathered": (522.0, 0.12), "int8": (713.0, 0.012), "fp16": (798.0, 4e-4)},
)


@looped(("share", "following"), [(0.85, "int8"), (1.1, "none")])
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


# ResNet-18 as the sweep had it: two ranks at 1 Gbit/s and 1 ms, and three at 500 Mbit/s and 5 ms. By recipe:
# ms predicted, MB sent, collectives, the assumed lateness, and ms of a step: as measured on trial or in the
# race, or, where it ran in neither, as it follows from others of the race.
Sent = dict[str, tuple[float, float, int, float, float]]
TWO_AT_1_GBIT: Sent = {
    "gcomp": (1292.8, 20.14, 60, 0.0, 1764.5),
    "fp16": (1223.5, 22.35, 4, 0.0004, 1442.2),
    "bf16(sum='fp32')": (1252.3, 22.35, 27, 0.0025, 1490.9),
    "bf16": (1224.1, 22.35, 4, 0.003, 1437.0),
    "int8": (1243.3, 11.38, 27, 0.01, 1263.3),
    "int8(collective='all_gather')": (1197.7, 11.38, 6, 0.01, 1260.0),
    "fp8": (1257.0, 11.38, 27, 0.04, 1270.0),
    "int4": (1245.2, 5.971, 27, 0.18, 1279.6),
    "int4(collective='all_gather')": (1196.5, 5.971, 6, 0.12, 1248.6),
}
THREE_AT_500_MBIT: Sent = {
    "gcomp": (2050.2, 26.85, 89, 0.0, 2811.9),
    "fp16": (1898.9, 29.79, 4, 0.0004, 2712.7),
    "bf16(sum='fp32')": (1942.0, 29.79, 27, 0.0025, 2402.6),
    "bf16": (1898.8, 29.79, 4, 0.003, 2356.6),
    "int8": (1920.5, 15.17, 27, 0.01, 2290.7),
    "int8(collective='all_gather')": (1865.7, 22.73, 6, 0.01, 2230.0),
    "fp8": (1962.2, 15.17, 27, 0.04, 2340.0),
    "int4": (1930.1, 7.961, 27, 0.18, 2180.9),
    "int4(collective='all_gather')": (1874.3, 11.92, 6, 0.12, 2137.4),
}


def _sending(sent: Sent, compute_ms: float, dense_ms: float) -> Comparison:
    options = [
        Option(text, text, predicted_ms / 1e3, 1e6 * megabytes, assumed, calls=calls)
        for text, (predicted_ms, megabytes, calls, assumed, _) in sent.items()
    ]
    return Comparison(tuple(options), 0.0, compute_ms / 1e3, dense_ms / 1e3, 60e6)


def _trials(comparison: Comparison, sent: Sent, most: int = 4) -> tuple[list[str], Comparison]:
    """Those that are tried in turn, and what is known after them."""
    tried: list[str] = []
    while len(tried) < most and (following := comparison.next_trial()) is not None:
        tried.append(following.recipe)
        late = 0.0 if following.assumed < 0.01 else min(following.assumed, comparison.limit)
        comparison = comparison.after_trial(following.recipe, sent[following.recipe][-1] / 1e3, late)
    return tried, comparison


@pytest.mark.parametrize(
    ("sent", "compute_ms", "dense_ms", "fastest_ms"),
    [(TWO_AT_1_GBIT, 1180.0, 1623.6, 1248.6), (THREE_AT_500_MBIT, 1767.0, 2377.8, 2137.4)],
    ids=["two at 1 Gbit/s", "three at 500 Mbit/s"],
)
def test_trials_do_not_all_go_to_recipes_that_send_as_much(
    sent: Sent, compute_ms: float, dense_ms: float, fastest_ms: float
) -> None:
    """Four trials went to a near-lossless frame and three casts, and what is much faster was not tried."""
    tried, known = _trials(_sending(sent, compute_ms, dense_ms), sent)
    best = known.best()
    assert best is not None
    assert best.expected_s < (1 + LEAD) * fastest_ms / 1e3
    assert len({sent[text][1] for text in tried}) == len(tried), "no two that send as many bytes"


def _casts_and_bits(**calls: int) -> Comparison:
    """MB sent: 20 as fp16 and bf16, 21 as `wider`, 10 as int8."""
    sent = {"fp16": 20.0, "bf16": 20.1, "wider": 21.0, "int8": 10.0}
    options = [
        Option(text, text, 0.06 + 0.001 * place, 1e6 * megabytes, 0.001 * place, calls=calls.get(text, 4))
        for place, (text, megabytes) in enumerate(sent.items())
    ]
    return Comparison(tuple(options), 0.0, 0.01, 0.1, 40e6)


def test_none_is_tried_that_sends_no_less_than_one_that_was_not_faster() -> None:
    slow = _casts_and_bits().after_trial("fp16", 0.099, 0.0)
    assert _next(slow) == "int8"
    assert _next(slow.after_trial("int8", 0.098, 0.01)) == "none"
    assert _next(_casts_and_bits().after_trial("int8", 0.098, 0.01)) == "none"


def test_one_in_fewer_collectives_is_tried_although_it_sends_more() -> None:
    """Where latency is all, it is the faster."""
    assert _next(_casts_and_bits(int8=5).after_trial("int8", 0.098, 0.01)) == "fp16"
    slow = _casts_and_bits(wider=3).after_trial("fp16", 0.099, 0.0).after_trial("int8", 0.098, 0.01)
    assert _next(slow) == "wider"


def test_what_was_faster_and_too_late_rules_nothing_out() -> None:
    late = _casts_and_bits().after_trial("int8", 0.05, 0.3)
    assert _next(replace(late, limit=0.15)) == "fp16"


def test_of_those_that_send_equally_many_bytes_one_is_tried_before_others_have_been() -> None:
    comparison = _casts_and_bits(int8=5).after_trial("fp16", 0.09, 0.0)
    assert _best(comparison) == "fp16"
    assert _next(comparison) == "wider", "bf16 sends as much as fp16, and would be the milder"
    comparison = comparison.after_trial("wider", 0.089, 0.0)
    assert _next(comparison) == "int8"
    assert _next(comparison.after_trial("int8", 0.088, 0.01)) == "bf16", "when all others have been tried"


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
        "topk(ratio=0.01)": "residual ratio above 0.3",
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
