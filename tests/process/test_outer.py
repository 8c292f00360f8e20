"""Real gloo ranks: local steps between rounds, beside DiLoCo of our own; left out, resumed, dying."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.process.scenes_outer import DEATHS, EVERY, SCENES
from tests.support import ranks
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process

ROUNDINGS = 2e-6
"""Of float32, over some twenty steps of AdamW, beside the way that parameters have gone."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On two ranks."""
    return Scenes("tests.process.scenes_outer", 2, tmp_path_factory.mktemp("outer"))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On four ranks: two machines of two."""
    return Scenes("tests.process.scenes_outer", 4, tmp_path_factory.mktemp("sites"))


def test_rounds_after_each_step_at_rate_one_are_gradients_averaged_step_by_step(world: Scenes) -> None:
    one, other = value(world, "follows attach")
    assert one["digest"] == other["digest"]
    # θ₀ − mean(θ₀ − θ): a difference, a sum of two, a product and a difference, each of one rounding.
    for step, apart in enumerate(one["apart"], start=1):
        assert apart <= 4 * step * one["rounding"]


@pytest.mark.parametrize("scene", rest(["beside own", "beside own, delayed"], but=["beside own, delayed"]))
def test_diloco_is_the_paper_s(world: Scenes, scene: str) -> None:
    for each in value(world, scene):
        assert each["rounds"] == 5
        assert each["relative"] < ROUNDINGS


def test_a_model_that_is_dropped_in_the_middle_of_a_round_ends_it_and_gives_its_group_back(
    world: Scenes,
) -> None:
    zero, one = value(world, "dropped in flight")
    assert (zero["rounds"], one["rounds"]) == (0, 1)
    assert zero["lent again"]
    assert one["lent again"]


def test_another_recipe_has_the_outer_optimizer_of_diloco(world: Scenes) -> None:
    assert value(world, "another recipe") == [{"same": True, "rounds": 2}] * 2


@pytest.mark.rest
def test_shared_parameters_are_the_same_bits_after_every_round_of_every_recipe(world: Scenes) -> None:
    one, other = value(world, "every recipe")
    assert one == other
    refused = {name for name, found in one.items() if isinstance(found, str)}
    assert refused == {"auto", "flexible", "mergecomp"}
    assert all("name a fixed recipe" in one[name] for name in refused)
    for name in one.keys() - refused:
        assert one[name] == {"alike": True, "moves": True}, name


def test_what_came_is_applied_or_left(world: Scenes) -> None:
    for each in value(world, "conservation"):
        assert each["remembers"] == 2
        assert each["units"] == 1  # as nothing comes before the rest, a second one would cost a latency
        # In each of six rounds Δ, its sums and the step of θ₀ are rounded, at sizes below the parameters'.
        assert each["error"] <= 6 * 4 * each["unit"]


@pytest.mark.parametrize("scene", rest(["at rest", "at rest, delayed"], but=["at rest"]))
def test_rounding_at_landing_is_no_part_of_what_was_learned(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [{"stays": True, "is rounded": True, "alike": True}] * 2


def test_replicas_that_learn_nothing_after_a_round_left_meet(world: Scenes) -> None:
    expected = {"before": False, "still": False, "after": True, "shared": True}
    assert value(world, "meeting") == [expected] * 2


def test_statistics_are_averaged_and_what_is_frozen_stays(world: Scenes) -> None:
    for rank, each in enumerate(value(world, "buffers")):
        assert each.pop("error") <= 1e-6
        assert each.pop("seen") == EVERY * (1 + rank)
        assert each == {"apart": True, "frozen": True, "mask": True, "alike": True, "rounds": 1}


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
@pytest.mark.parametrize("recipe", rest(["dense", "diloco", "int4"], but=["int4"]))
def test_buffers_that_begin_not_finite_or_change_shape_change_nothing(
    world: Scenes, recipe: str, delay: int
) -> None:
    for each in value(world, f"observed, {recipe}, {delay}"):
        assert each == {"as without": True, "alike": True, "shown": True, "resumed": True}


def test_a_buffer_of_other_shapes_on_some_ranks_is_each_one_s_own_until_all_have_one(world: Scenes) -> None:
    one, other = value(world, "observed by some")
    assert (one.pop("sizes"), other.pop("sizes")) == ([64], [0])
    assert one["largest"] == other["largest"] > -1.0  # rank 1 has taken what rank 0 has seen
    for each in (one, other):
        assert each.pop("error") <= 1e-7  # roundings of numbers below one
        del each["largest"]
        assert each == {"apart": True, "alike": True, "rounds": 5}


def test_statistics_that_are_not_finite_are_replaced_and_parameters_stay(world: Scenes) -> None:
    for each in value(world, "statistics not finite"):
        assert each.pop("error") <= 1e-6  # θ₀ − mean(θ₀ − θ), beside the mean
        assert each == {"theirs": True, "alike": True, "rounds": 1}


LOADED = [name for name in SCENES if name.startswith("loaded, ")]


@pytest.mark.parametrize("scene", rest(LOADED, but=["loaded, parts", "loaded, int4, 2", "loaded, diloco, 0"]))
def test_what_all_ranks_load_is_what_rounds_go_on_from(world: Scenes, scene: str) -> None:
    for each in value(world, scene):
        assert each == {"shown": True, "stays": True, "learns": True, "alike": True}


@pytest.mark.parametrize(("scene", "first"), [("one", "nothing"), ("all, not the same", "values of")])
def test_ranks_that_load_different_values_hear_of_it_on_all_until_they_load_the_same(
    world: Scenes, scene: str, first: str
) -> None:
    one, other = value(world, f"loaded by {scene}")
    assert one == other
    said = f"ranks disagree on what load_state_dict has brought since the last round: rank 0: {first}"
    assert [each.partition(": ")[0] for each in one["raised"]] == [str(2 * EVERY + 1), str(3 * EVERY + 1)]
    assert all(each.partition(": ")[2].startswith(said) for each in one["raised"])
    assert "; rank 1: values of fingerprint" in one["ended"]
    assert one["alike"]


def test_ranks_that_load_the_same_part_before_and_after_a_landing_hear_of_it(world: Scenes) -> None:
    """One has thrown the round away, and the other has landed it."""
    one, other = value(world, "loaded around a landing")
    assert one == other
    assert one["raised"].startswith(f"{2 * EVERY + 1}: ranks disagree on what load_state_dict has brought")
    assert one["alike"], "what they load later, together"


@pytest.mark.parametrize("delayed", rest(["", ", delayed"], but=[", delayed"]))
def test_loading_the_values_that_are_there_changes_no_bit(world: Scenes, delayed: str) -> None:
    assert value(world, f"loading nothing{delayed}") == [{"again": True, "swapped": True}] * 2


@pytest.mark.parametrize("first", ["model", "wire"])
def test_a_run_resumes_bit_for_bit_where_the_model_is_loaded_too(world: Scenes, first: str) -> None:
    assert value(world, f"resumed, {first} first") == [{"same": True}] * 2


def test_what_was_loaded_is_what_is_saved_and_shown(world: Scenes) -> None:
    assert value(world, "saved after loading") == [{"theta": True, "shared": True, "shown": True}] * 2


def test_optimizers_may_be_an_iterator(world: Scenes) -> None:
    found = value(world, "once each")
    assert [(each["both"], each["one"]) for each in found] == [([4, True], [4, True])] * 2
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


def test_what_one_rank_alone_had_loaded_before_a_save_is_told_in_the_resumed_round(world: Scenes) -> None:
    for each in value(world, "saved after loading alone"):
        assert each["raised"].startswith("ranks disagree on what load_state_dict has brought")
        assert each["alike"], "what they load later, together"


def test_a_load_that_would_have_no_effect_is_refused(world: Scenes) -> None:
    for each in value(world, "load refused"):
        assert each["assign"].startswith("load_state_dict(assign=True) puts other parameters in the place")
        assert "load without assign=True" in each["assign"]
        assert each["inside"].startswith("load_state_dict was called inside wire.shared_parameters()")
        assert each["same"]


def test_copies_of_a_model_are_loaded_without_effect_here(world: Scenes) -> None:
    assert value(world, "copies load") == [{"stays": True, "hooks": [0, 0]}] * 2


def test_parameters_that_are_written_between_steps_are_warned_of_once(world: Scenes) -> None:
    for each in value(world, "edited"):
        assert (each["nothing"], each["several"], each["loaded"]) == ([], [], [])
        for name in ("by hand", "swapped"):
            [said] = each[name]
            assert "If their values are back as they were" in said


RESUMED = {
    "resumed": (EVERY + 2, True),
    "resumed, between rounds": (2 * EVERY, True),
    "resumed, under way": (EVERY + 1, False),
    "resumed, without a replica": (EVERY + 1, False),
}
"""By scene: steps before the save, and whether replicas are equal at the end."""


@pytest.mark.parametrize("scene", rest(RESUMED, but=["resumed, under way", "resumed, without a replica"]))
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_round(world: Scenes, scene: str) -> None:
    begins, alike = RESUMED[scene]
    expected = {"begins": begins, "own": True, "shared": True, "alike": alike}
    assert value(world, scene) == [expected] * 2


def test_one_rank_s_save_is_enough_between_rounds_and_refused_within(world: Scenes) -> None:
    for each in value(world, "from another rank"):
        assert "in the middle of a round" in each.pop("refused")
        assert each == {"theta": True, "momentum": True, "at": 2 * EVERY}


@pytest.mark.parametrize("scene", rest(["not finite", "not finite, delayed"], but=["not finite, delayed"]))
def test_a_replica_that_is_not_finite_is_left_out_of_the_mean(world: Scenes, scene: str) -> None:
    for rank, each in enumerate(value(world, scene)):
        assert each.pop("error") <= 2e-8  # a rounding of θ₀ beside half of Δ, which is 1000 times as much
        assert each == {"alike": True, "memory stays": rank == 1, "finite": True, "rounds": 2}


def test_a_replica_that_is_never_finite_raises_and_the_others_hear_of_it(world: Scenes) -> None:
    one, other = value(world, "not finite for good")
    assert one.pop("raised").startswith("5: PeerFailed: rank 1")
    assert other.pop("raised").startswith("5: GradwireError: rank 1: 0.weight was not finite in 3 rounds")
    assert one == other == {"alike": True, "rounds": 7}


def test_rounds_without_a_replica_are_counted_over_a_save(world: Scenes) -> None:
    one, other = value(world, "not finite over a save")
    assert one.pop("raised").startswith("PeerFailed: rank 1")
    assert other.pop("raised").startswith("GradwireError: rank 1: 0.weight was not finite in 3 rounds")
    assert one == other == {"before": ["", ""], "alike": True}


def test_nothing_lands_where_no_replica_is_finite(world: Scenes) -> None:
    assert value(world, "nobody left") == [{"stays": True, "back": True}] * 2


def test_an_error_on_one_rank_is_named_on_all_and_no_rank_lands(world: Scenes) -> None:
    for each, name in zip(value(world, "failing"), ["PeerFailed", "ValueError"], strict=True):
        assert each == {"raised": name, "stays": True, "alike": True}


def test_what_was_learned_before_a_failed_round_comes_with_the_last_one(world: Scenes) -> None:
    for each, name in zip(value(world, "failing at the end"), ["PeerFailed", "ValueError"], strict=True):
        assert each.pop("error") <= 1e-6  # θ₀ less the mean Δ, of numbers below 1: three roundings
        assert each == {"raised": name, "alike": True}


@pytest.mark.parametrize("scene", [name for name in SCENES if name.startswith("left out")])
def test_steps_that_are_left_out_count_as_attempted(world: Scenes, scene: str) -> None:
    for each in value(world, scene):
        assert each["counts"][-1] == 3 * EVERY
        assert (each["alike"], each["rounds"]) == (True, 3)


CALLED = [name for name in SCENES if name.startswith("called")]


@pytest.mark.parametrize("scene", rest(CALLED, but=CALLED[::4]))
def test_attempts_are_counted_in_time_however_the_model_is_called(world: Scenes, scene: str) -> None:
    in_time = list(range(1, 3 * EVERY + 1))
    shows_late = [step - (step in (2, 8)) for step in in_time]
    for each, counts in zip(value(world, scene), (in_time, shows_late), strict=True):
        assert each == {"counts": counts, "alike": True, "rounds": 3}


@pytest.mark.parametrize("scene", rest(["halves", "halves, inner given"], but=["halves"]))
def test_the_first_half_of_a_sharpness_aware_step_is_no_attempt(world: Scenes, scene: str) -> None:
    in_time = list(range(1, 3 * EVERY + 1))
    shows_late = [step - (step == EVERY + 1) for step in in_time]
    assert value(world, scene) == [[counts, True, 3] for counts in (in_time, shows_late)]


def test_optimizers_that_were_not_given_step_in_place_of_one_that_was(world: Scenes) -> None:
    assert value(world, "in place of one") == [[1, 2, 3, 4, 5, 6, 6]] * 2


@pytest.mark.parametrize("scene", ["cleared late", "cleared late, twice"])
def test_a_step_that_shows_late_to_be_left_out_still_brings_its_round(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [{"attempts": 2 * EVERY, "alike": True, "rounds": 2}] * 2


def test_what_an_attempted_step_is(world: Scenes) -> None:
    expected = {"micro": 3, "several": 3, "one of several": 5, "grad": 3, "closure": 2, "scaler": 4}
    assert value(world, "counting") == [expected] * 2


def test_replicas_with_less_data_wait_for_the_others(world: Scenes) -> None:
    assert value(world, "uneven") == [{"ends": True, "goes on": True, "shared": True}] * 2


def test_evaluation_switch_and_the_last_round(world: Scenes) -> None:
    flags = dict.fromkeys(["back", "start", "unsent", "alike", "apart again"], True)
    assert value(world, "at the end") == [flags | {"recipe": "dense"}] * 2


def test_the_optimizer_may_change_while_a_former_recipe_is_being_flushed(world: Scenes) -> None:
    assert value(world, "both at once") == [True] * 2


@pytest.mark.parametrize(
    ("scene", "rounds"),
    [pytest.param("in turn", [4, 3], marks=pytest.mark.rest), ("in turn, delayed", [3, 2])],
)
def test_parts_of_a_model_take_turns_by_wires_of_their_own(
    world: Scenes, scene: str, rounds: list[int]
) -> None:
    assert value(world, scene) == [{"alike": True, "in turn": True, "rounds": rounds, "resumed": True}] * 2


@pytest.mark.parametrize("delay", rest([0, 2], but=[0]))
def test_another_optimizer_takes_over_and_the_count_goes_on(world: Scenes, delay: int) -> None:
    for each in value(world, "two phases, delayed" if delay else "two phases"):
        assert each["counts"] == list(range(EVERY + 1, 3 * EVERY + delay + 1))
        # With a delay, the round of the first optimizer is under way when the second one takes over.
        landings = [each * EVERY + delay for each in ((1, 2, 3) if delay else (2, 3))]
        assert each["landed"] == [[at, True] for at in landings]
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
def test_what_cannot_be_is_refused_in_words(world: Scenes, what: str) -> None:
    for each in value(world, "refused"):
        assert each[what].startswith(REFUSED[what])


@pytest.mark.parametrize("delayed", rest(["", ", delayed"], but=[", delayed"]))
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_machines_of_two_ranks_train_as_two_replicas_and_send_the_model_once(
    sites: Scenes, kind: str, delayed: str
) -> None:
    for each in value(sites, f"{kind} inside{delayed}"):
        assert each["relative"] < ROUNDINGS
        assert each["inside alike"]
        assert each["alike"] == (delayed == "")
        assert each["rounds"] == 3
        # Two machines all-reduce each half of the model between two ranks; beside it go rows and paddings.
        assert 4 * each["elements"] / 2 <= each["bytes"] <= 4 * each["elements"] / 2 + 300


@pytest.mark.parametrize("kind", rest(["ddp", "fsdp"], but=["fsdp"]))
def test_machines_compress_between_each_other(sites: Scenes, kind: str) -> None:
    for each in value(sites, f"{kind} inside, topk"):
        assert each["alike"]
        assert each["bytes"] < 4 * each["elements"] / 4


LOADED_INSIDE = [
    "ddp inside, loaded",
    "fsdp inside, loaded",
    "fsdp inside, loaded by dcp",
    "fsdp inside, set",
]


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> ranks.Results:
    """Four ranks of their own: an error that all ranks raise in a round keeps the model."""
    folder = tmp_path_factory.mktemp("loading")
    return ranks.perform("tests.process.scenes_outer", 4, folder, LOADED_INSIDE)


@pytest.mark.rest
@pytest.mark.parametrize("scene", LOADED_INSIDE)
def test_machines_go_on_from_what_all_ranks_load_and_hear_of_one_that_loads_alone(
    loading: ranks.Results, scene: str
) -> None:
    for each in ranks.value(loading, scene):
        assert (each["stays"], each["shared"]) == (True, True)
        assert "rank 2: nothing; rank 3: values of fingerprint" in each["raised"]


@pytest.mark.parametrize("kind", rest(["ddp", "fsdp"], but=["fsdp"]))
def test_machines_resume_with_a_round_under_way(sites: Scenes, kind: str) -> None:
    assert value(sites, f"{kind} inside, resumed") == [{"same": True}] * 4


def test_a_machine_is_left_out_for_one_shard(sites: Scenes) -> None:
    for each in value(sites, "one shard not finite"):
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
    assert value(Scenes("tests.process.scenes_outer", 2, after), "going on") == [expected] * 2
    alone.mkdir()
    [found] = value(Scenes("tests.process.scenes_outer", 1, alone), "from two ranks")
    assert found == {"begins": True, "attempts": 2 * EVERY + 3 * EVERY, "finite": True}
