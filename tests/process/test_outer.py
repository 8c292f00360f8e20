"""Real gloo ranks: local steps between rounds, beside DiLoCo of our own; left out, resumed, dying."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.process import scenes_outer as scenes
from tests.process.scenes_outer import DEATHS, EVERY, LOADED
from tests.support import ranks
from tests.support.models import optimizer_of, perceptron
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

ROUNDINGS = 2e-6
"""Of float32, over some twenty steps of AdamW, beside the way that parameters have gone."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two machines of two ranks."""
    return Ranks(4, tmp_path_factory.mktemp("sites"))


def test_rounds_after_each_step_at_rate_one_are_gradients_averaged_step_by_step(two: Ranks) -> None:
    one, other = two(scenes.follows_attach)
    assert one["digest"] == other["digest"]
    # θ₀ − mean(θ₀ − θ): a difference, a sum of two, a product and a difference, each of one rounding.
    for step, apart in enumerate(one["apart"], start=1):
        assert apart <= 4 * step * one["rounding"]


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
def test_diloco_is_the_paper_s(two: Ranks, delay: int) -> None:
    for each in two(scenes.beside_own, delay):
        assert each["rounds"] == 5
        assert each["relative"] < ROUNDINGS


def test_a_model_that_is_dropped_in_the_middle_of_a_round_ends_it_and_gives_its_group_back(
    two: Ranks,
) -> None:
    zero, one = two(scenes.dropped_in_flight)
    assert (zero["rounds"], one["rounds"]) == (0, 1)
    assert zero["lent again"]
    assert one["lent again"]


def test_another_recipe_has_the_outer_optimizer_of_diloco(two: Ranks) -> None:
    assert two(scenes.another_recipe) == [{"same": True, "rounds": 2}] * 2


@pytest.mark.rest
def test_shared_parameters_are_the_same_bits_after_every_round_of_every_recipe(two: Ranks) -> None:
    one, other = two(scenes.with_every_recipe)
    assert one == other
    refused = {name for name, found in one.items() if isinstance(found, str)}
    assert refused == {"auto", "flexible", "mergecomp"}
    assert all("name a fixed recipe" in one[name] for name in refused)
    for name in one.keys() - refused:
        assert one[name] == {"alike": True, "moves": True}, name


def test_what_came_is_applied_or_left(two: Ranks) -> None:
    for each in two(scenes.conservation):
        assert each["remembers"] == 2
        assert each["units"] == 1  # as nothing comes before the rest, a second one would cost a latency
        # In each of six rounds Δ, its sums and the step of θ₀ are rounded, at sizes below the parameters'.
        assert each["error"] <= 6 * 4 * each["unit"]


@pytest.mark.parametrize("delay", rest([0, 2], but=[0]))
def test_rounding_at_landing_is_no_part_of_what_was_learned(two: Ranks, delay: int) -> None:
    assert two(scenes.at_rest, delay) == [{"stays": True, "is rounded": True, "alike": True}] * 2


def test_replicas_that_learn_nothing_after_a_round_left_meet(two: Ranks) -> None:
    expected = {"before": False, "still": False, "after": True, "shared": True}
    assert two(scenes.meeting) == [expected] * 2


def test_statistics_are_averaged_and_what_is_frozen_stays(two: Ranks) -> None:
    for rank, each in enumerate(two(scenes.buffers)):
        assert each.pop("error") <= 1e-6
        assert each.pop("seen") == EVERY * (1 + rank)
        assert each == {"apart": True, "frozen": True, "mask": True, "alike": True, "rounds": 1}


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
@pytest.mark.parametrize("recipe", rest(["dense", "diloco", "int4"], but=["int4"]))
def test_buffers_that_begin_not_finite_or_change_shape_change_nothing(
    two: Ranks, recipe: str, delay: int
) -> None:
    for each in two(scenes.observed, recipe, delay):
        assert each == {"as without": True, "alike": True, "shown": True, "resumed": True}


def test_a_buffer_of_other_shapes_on_some_ranks_is_each_one_s_own_until_all_have_one(two: Ranks) -> None:
    one, other = two(scenes.observed_by_some)
    assert (one.pop("sizes"), other.pop("sizes")) == ([64], [0])
    assert one["largest"] == other["largest"] > -1.0  # rank 1 has taken what rank 0 has seen
    for each in (one, other):
        assert each.pop("error") <= 1e-7  # roundings of numbers below one
        del each["largest"]
        assert each == {"apart": True, "alike": True, "rounds": 5}


def test_statistics_that_are_not_finite_are_replaced_and_parameters_stay(two: Ranks) -> None:
    for each in two(scenes.statistics_not_finite):
        assert each.pop("error") <= 1e-6  # θ₀ − mean(θ₀ − θ), beside the mean
        assert each == {"theirs": True, "alike": True, "rounds": 1}


WAYS = [
    *((way, "int4", 2) for way in (scenes.load_compiled, scenes.load_parts, scenes.load_twice)),
    *((way, "int4", 2) for way in (scenes.load_by_dcp, scenes.load_by_setting)),
    *(
        (scenes.load_all, recipe, delay)
        for recipe in ("dense", "diloco", "int4", "topk(0.05)", "sparseloco")
        for delay in (0, 2)
    ),
]
"""Ways to load, with recipe and delay."""
SOON = [(scenes.load_parts, "int4", 2), (scenes.load_all, "int4", 2), (scenes.load_all, "diloco", 0)]


@pytest.mark.parametrize("loaded", rest(WAYS, but=SOON))
def test_what_all_ranks_load_is_what_rounds_go_on_from(
    two: Ranks, loaded: tuple[scenes.Way, str, int]
) -> None:
    for each in two(scenes.loaded, *loaded):
        assert each == {"shown": True, "stays": True, "learns": True, "alike": True}


@pytest.mark.parametrize(("which", "first"), [("one", "nothing"), ("all", "values of")])
def test_ranks_that_load_different_values_hear_of_it_on_all_until_they_load_the_same(
    two: Ranks, which: str, first: str
) -> None:
    one, other = two(scenes.loaded_apart, which)
    assert one == other
    said = f"ranks disagree on what load_state_dict has brought since the last round: rank 0: {first}"
    assert [each.partition(": ")[0] for each in one["raised"]] == [str(2 * EVERY + 1), str(3 * EVERY + 1)]
    assert all(each.partition(": ")[2].startswith(said) for each in one["raised"])
    assert "; rank 1: values of fingerprint" in one["ended"]
    assert one["alike"]


def test_ranks_that_load_the_same_part_before_and_after_a_landing_hear_of_it(two: Ranks) -> None:
    """One has thrown the round away, and the other has landed it."""
    one, other = two(scenes.loaded_around_a_landing)
    assert one == other
    assert one["raised"].startswith(f"{2 * EVERY + 1}: ranks disagree on what load_state_dict has brought")
    assert one["alike"], "what they load later, together"


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
def test_loading_the_values_that_are_there_changes_no_bit(two: Ranks, delay: int) -> None:
    assert two(scenes.loading_nothing, delay) == [{"again": True, "swapped": True}] * 2


@pytest.mark.parametrize("first", ["model", "wire"])
def test_a_run_resumes_bit_for_bit_where_the_model_is_loaded_too(two: Ranks, first: str) -> None:
    assert two(scenes.resumed_with_the_model, 2, first) == [{"same": True}] * 2


def test_what_was_loaded_is_what_is_saved_and_shown(two: Ranks) -> None:
    assert two(scenes.saved_after_loading) == [{"theta": True, "shared": True, "shown": True}] * 2


def test_optimizers_may_be_an_iterator(two: Ranks) -> None:
    found = two(scenes.once_each)
    assert [(each["both"], each["one"]) for each in found] == [((4, True), (4, True))] * 2
    for what, kind in (("parameters", "Parameter"), ("nothing", "nothing")):
        one, other = (each[what] for each in found)
        assert one == (
            "ValueError: the second argument is an optimizer or a list of them, got a list of "
            f"{kind}; pass the optimizer itself"
        )
        assert other.startswith("RanksDisagree: ")
        assert (
            f"rank 0: refused, the second argument is an optimizer or a list of them, got a list of {kind}"
            in other
        )


def test_what_one_rank_alone_had_loaded_before_a_save_is_told_in_the_resumed_round(two: Ranks) -> None:
    for each in two(scenes.saved_after_loading_alone):
        assert each["raised"].startswith("ranks disagree on what load_state_dict has brought")
        assert each["alike"], "what they load later, together"


def test_a_load_that_would_have_no_effect_is_refused(two: Ranks) -> None:
    for each in two(scenes.load_refused):
        assert each["assign"].startswith("load_state_dict(assign=True) puts other parameters in the place")
        assert "load without assign=True" in each["assign"]
        assert each["inside"].startswith("load_state_dict was called inside wire.shared_parameters()")
        assert each["same"]


def test_copies_of_a_model_are_loaded_without_effect_here(two: Ranks) -> None:
    assert two(scenes.copies_load) == [{"stays": True, "hooks": [0, 0]}] * 2


def test_parameters_that_are_written_between_steps_are_warned_of_once(two: Ranks) -> None:
    for each in two(scenes.edited):
        assert (each["nothing"], each["several"], each["loaded"]) == ([], [], [])
        for name in ("by hand", "swapped"):
            [said] = each[name]
            assert "If their values are back as they were" in said


RESUMED = [
    ("topk(ratio=0.1)", 0, EVERY + 2),
    ("diloco", 0, 2 * EVERY),
    ("topk(ratio=0.1)", 3, EVERY + 1),
    ("dense", 2, EVERY + 1, EVERY - 1),
]
"""Recipe, delay, steps before the save, and the step in which a replica is spoilt: within a round, between
rounds, with one under way, and with one under way to which a replica brings nothing."""


@pytest.mark.parametrize("resumed", rest(RESUMED, but=RESUMED[2:]))
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_round(
    two: Ranks, resumed: tuple[str, int, int]
) -> None:
    _recipe, delay, begins, *_spoilt = resumed
    expected = {"begins": begins, "own": True, "shared": True, "alike": delay == 0}
    assert two(scenes.resumed, *resumed) == [expected] * 2


def saved_while_one_is_late() -> dict[str, Tensor] | None:
    """The means of a round, in a state of when rank 1 has not sent it yet."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = scenes.outer(model, optimizer, "dense", delay=1)
    scenes.steps(model, optimizer, range(EVERY - 1))
    time.sleep(0.2 * dist.get_rank())
    scenes.steps(model, optimizer, range(EVERY - 1, EVERY))
    means: dict[str, Tensor] | None = own_state(wire)["source"]["flight"]["means"]
    wire.detach()
    return means


def test_a_save_waits_for_the_round_that_is_under_way(two: Ranks) -> None:
    one, other = two(saved_while_one_is_late)
    assert one is not None
    assert other is not None
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_one_rank_s_save_is_enough_between_rounds_and_refused_within(two: Ranks) -> None:
    for each in two(scenes.from_another_rank):
        assert "in the middle of a round" in each.pop("refused")
        assert each == {"theta": True, "momentum": True, "at": 2 * EVERY}


@pytest.mark.parametrize("delay", rest([0, 1], but=[1]))
def test_a_replica_that_is_not_finite_is_left_out_of_the_mean(two: Ranks, delay: int) -> None:
    for rank, each in enumerate(two(scenes.not_finite, delay)):
        assert each.pop("error") <= 2e-8  # a rounding of θ₀ beside half of Δ, which is 1000 times as much
        assert each == {"alike": True, "memory stays": rank == 1, "finite": True, "rounds": 2}


def test_a_replica_that_is_never_finite_raises_and_the_others_hear_of_it(two: Ranks) -> None:
    one, other = two(scenes.not_finite_for_good)
    assert one.pop("raised").startswith("5: PeerFailed: rank 1")
    assert other.pop("raised").startswith("5: GradwireError: rank 1: 0.weight was not finite in 3 rounds")
    assert one == other == {"alike": True, "rounds": 7}


def test_rounds_without_a_replica_are_counted_over_a_save(two: Ranks) -> None:
    one, other = two(scenes.not_finite_before_and_after_a_save)
    assert one.pop("raised").startswith("PeerFailed: rank 1")
    assert other.pop("raised").startswith("GradwireError: rank 1: 0.weight was not finite in 3 rounds")
    assert one == other == {"before": ["", ""], "alike": True}


def test_nothing_lands_where_no_replica_is_finite(two: Ranks) -> None:
    assert two(scenes.nobody_left) == [{"stays": True, "back": True}] * 2


def test_an_error_on_one_rank_is_named_on_all_and_no_rank_lands(two: Ranks) -> None:
    for each, name in zip(two(scenes.failing), ["PeerFailed", "ValueError"], strict=True):
        assert each == {"raised": name, "stays": True, "alike": True}


def test_what_was_learned_before_a_failed_round_comes_with_the_last_one(two: Ranks) -> None:
    for each, name in zip(two(scenes.failing_at_the_end), ["PeerFailed", "ValueError"], strict=True):
        assert each.pop("error") <= 1e-6  # θ₀ less the mean Δ, of numbers below 1: three roundings
        assert each == {"raised": name, "alike": True}


@pytest.mark.parametrize(
    ("way", "skipped"),
    [
        (scenes.leave_out_clearing, (1, 7)),
        (scenes.leave_out_zeroing, (2, 3)),
        (scenes.leave_out_saying, (3, 11)),
    ],
)
def test_steps_that_are_left_out_count_as_attempted(
    two: Ranks, way: Callable[[Any, Any], None], skipped: tuple[int, ...]
) -> None:
    for each in two(scenes.left_out, way, skipped):
        assert each["counts"][-1] == 3 * EVERY
        assert (each["alike"], each["rounds"]) == (True, 3)


CALLED = [
    (case, wrapped)
    for case in (
        *("model.forward(x)", "an object", "a namespace", "none", "slots", "none, frozen"),
        *("none, checkpointed", "none, twice", "none, penalty", "an optimizer for each parameter"),
        *("lookahead", "lookahead without hooks", "around a copy"),
    )
    for wrapped in (False, True)
]
"""Cases of `tests.support.called`, and whether DDP is around the model."""


@pytest.mark.parametrize("called", rest(CALLED, but=CALLED[::4]))
def test_attempts_are_counted_in_time_however_the_model_is_called(
    two: Ranks, called: tuple[str, bool]
) -> None:
    in_time = list(range(1, 3 * EVERY + 1))
    shows_late = [step - (step in (2, 8)) for step in in_time]
    for each, counts in zip(two(scenes.called, *called), (in_time, shows_late), strict=True):
        assert each == {"counts": counts, "alike": True, "rounds": 3}


@pytest.mark.parametrize("gives_inner", rest([False, True], but=[False]))
def test_the_first_half_of_a_sharpness_aware_step_is_no_attempt(two: Ranks, gives_inner: bool) -> None:
    in_time = list(range(1, 3 * EVERY + 1))
    shows_late = [step - (step == EVERY + 1) for step in in_time]
    for each, counts in zip(two(scenes.by_halves, gives_inner), (in_time, shows_late), strict=True):
        assert each == {"counts": counts, "alike": True, "rounds": 3}


def test_optimizers_that_were_not_given_step_in_place_of_one_that_was(two: Ranks) -> None:
    assert two(scenes.in_place_of_one) == [[1, 2, 3, 4, 5, 6, 6]] * 2


@pytest.mark.parametrize("in_a_row", [1, 2])
def test_a_step_that_shows_late_to_be_left_out_still_brings_its_round(two: Ranks, in_a_row: int) -> None:
    assert two(scenes.cleared_late, in_a_row) == [{"attempts": 2 * EVERY, "alike": True, "rounds": 2}] * 2


def test_what_an_attempted_step_is(two: Ranks) -> None:
    expected = {"micro": 3, "several": 3, "one of several": 5, "grad": 3, "closure": 2, "scaler": 4}
    assert two(scenes.counting) == [expected] * 2


def test_replicas_with_less_data_wait_for_the_others(two: Ranks) -> None:
    assert two(scenes.uneven) == [{"ends": True, "goes on": True, "shared": True}] * 2


def test_evaluation_switch_and_the_last_round(two: Ranks) -> None:
    flags = dict.fromkeys(["back", "start", "unsent", "alike", "apart again"], True)
    assert two(scenes.at_the_end) == [flags | {"recipe": "dense"}] * 2


def test_the_optimizer_may_change_while_a_former_recipe_is_being_flushed(two: Ranks) -> None:
    assert two(scenes.both_at_once) == [True] * 2


@pytest.mark.parametrize(
    ("delay", "rounds"), [pytest.param(0, [4, 3], marks=pytest.mark.rest), (EVERY - 1, [3, 2])]
)
def test_parts_of_a_model_take_turns_by_wires_of_their_own(two: Ranks, delay: int, rounds: list[int]) -> None:
    expected = {"alike": True, "in turn": True, "rounds": rounds, "resumed": True}
    assert two(scenes.taking_turns, delay) == [expected] * 2


@pytest.mark.parametrize("delay", rest([0, 2], but=[0]))
def test_another_optimizer_takes_over_and_the_count_goes_on(two: Ranks, delay: int) -> None:
    for each in two(scenes.two_phases, delay):
        assert each["counts"] == list(range(EVERY + 1, 3 * EVERY + delay + 1))
        # With a delay, the round of the first optimizer is under way when the second one takes over.
        landings = [each * EVERY + delay for each in ((1, 2, 3) if delay else (2, 3))]
        assert each["landed"] == [(at, True) for at in landings]
        # The first one has all parameters of the one that is followed: its steps count again.
        assert each["ended"] == 3 * EVERY + delay + EVERY
        assert each["resumed"]
        assert each["refused"].startswith("ScheduleFree has train() and eval()")


REFUSED = {
    "delay": "ValueError: delay=4 is not a number of steps below every=4",
    "every": "ValueError: every=0 is not a number of steps",
    "neither": "ValueError: pass either replicas=, the ranks that average, or members=",
    "both": "ValueError: pass either replicas=, the ranks that average, or members=",
    "no time": "ValueError: every_seconds=0.0 is not a finite time above 0",
    "time and delay": "ValueError: every_seconds=1.0 needs rounds without a delay, not delay=1",
    "auto": "ValueError: auto and other recipes that measure",
    "gcomp": "ValueError: gcomp reads the state",
    "no optimizer": "ValueError: outer() counts an optimizer's steps",
    "outer": "ValueError: outer= made an optimizer of other parameters",
    "schedule-free": "ValueError: ScheduleFree has train() and eval(), as schedule-free optimizers do",
    "ranks": "RanksDisagree: ranks disagree on every",
    "flush": "ValueError: flush() adds to gradients",
    "switch": "ValueError: auto and other recipes that measure",
    "attach": "ValueError: this model is carried already, by its local steps, over ranks [0, 1]",
    "twice": "ValueError: this model is carried already, by its local steps, over ranks [0, 1]",
    "after attach": "ValueError: this model is carried already, by its DistributedDataParallel",
    "ddp over all": "ValueError: this model is carried already, by its DistributedDataParallel",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_words(two: Ranks, what: str) -> None:
    for each in two(scenes.refused):
        assert each[what].startswith(REFUSED[what])


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_machines_of_two_ranks_train_as_two_replicas_and_send_the_model_once(
    four: Ranks, kind: str, delay: int
) -> None:
    for each in four(scenes.on_two_sites, kind, "diloco", delay):
        assert each["relative"] < ROUNDINGS
        assert each["inside alike"]
        assert each["alike"] == (delay == 0)
        assert each["rounds"] == 3
        # Two machines all-reduce each half of the model between two ranks; beside it go rows and paddings.
        assert 4 * each["elements"] / 2 <= each["bytes"] <= 4 * each["elements"] / 2 + 300


@pytest.mark.parametrize("kind", rest(["ddp", "fsdp"], but=["fsdp"]))
def test_machines_compress_between_each_other(four: Ranks, kind: str) -> None:
    for each in four(scenes.on_two_sites, kind, "topk(ratio=0.1)"):
        assert each["alike"]
        assert each["bytes"] < 4 * each["elements"] / 4


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> ranks.Results:
    """Four ranks of their own: an error that all ranks raise in a round keeps the model."""
    folder = tmp_path_factory.mktemp("loading")
    return ranks.perform("tests.process.scenes_outer", 4, folder, [*LOADED])


@pytest.mark.rest
@pytest.mark.parametrize("scene", LOADED)
def test_machines_go_on_from_what_all_ranks_load_and_hear_of_one_that_loads_alone(
    loading: ranks.Results, scene: str
) -> None:
    for each in ranks.value(loading, scene):
        assert (each["stays"], each["shared"]) == (True, True)
        assert "rank 2: nothing; rank 3: values of fingerprint" in each["raised"]


@pytest.mark.parametrize("kind", rest(["ddp", "fsdp"], but=["fsdp"]))
def test_machines_resume_with_a_round_under_way(four: Ranks, kind: str) -> None:
    assert four(scenes.resumed_on_two_sites, kind) == [{"same": True}] * 4


def test_a_machine_is_left_out_for_one_shard(four: Ranks) -> None:
    for each in four(scenes.one_shard_not_finite):
        assert each["alike"]
        assert each["error"] <= 1e-7  # θ₀ − (θ₀ − θ)


def _dead(place: Path, scene: str) -> Any:
    """Rank 1 dies in the scene; what rank 0 hears."""
    place.mkdir()
    with ranks.started("tests.process.scenes_outer", 2, place, [scene], 40.0) as started:
        started[0].wait(120.0)
        assert started[1].wait(10.0) == -signal.SIGKILL
    return json.loads((place / "0.json").read_text())[scene]["value"]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder that has what the dead have saved, and what was heard of each."""
    folder = tmp_path_factory.mktemp("deaths")
    with ThreadPoolExecutor(2) as pool:
        heard = pool.map(lambda name: _dead(folder / name, f"dying {name}"), DEATHS)
        return folder, dict(zip(DEATHS, heard, strict=True))


@pytest.mark.rest
@pytest.mark.parametrize("name", DEATHS)
def test_a_rank_that_dies_is_named_to_the_others(deaths: tuple[Path, dict[str, Any]], name: str) -> None:
    told = deaths[1][name]
    assert told["heard at"] == DEATHS[name].heard_at
    assert re.search(r"\[127\.0\.0\.1\]:\d+", told["text"]), "the peer's address"


@pytest.mark.rest
def test_what_the_dead_have_saved_goes_on_bit_for_bit(deaths: tuple[Path, dict[str, Any]]) -> None:
    after, alone = deaths[0] / "after", deaths[0] / "alone"
    after.mkdir()
    expected = {name: [death.saved_at, True] for name, death in DEATHS.items()}
    assert Ranks(2, after)(scenes.going_on) == [expected] * 2
    alone.mkdir()
    [found] = Ranks(1, alone)(scenes.from_two_ranks)
    assert found == {"begins": True, "attempts": 2 * EVERY + 3 * EVERY, "finite": True}
