"""Real gloo ranks: what people do between `backward()` and `step()`.

The table is in `docs/engineering/design.md`; its rows are in `tests/unit/step/test_undo.py`. Here is shown
that hooks see what happens however a model is called and an optimizer is made, that memory goes back on all
ranks, and that ranks that differ hear of it.
"""

from __future__ import annotations

import pytest

from gradwire._api.report import Report
from tests.process.scenes_steps import (
    CALLED,
    CASE_RECIPES,
    CASES,
    LEFT_OUT,
    RECIPES,
    RESUMED,
    RISEN,
    TELLING_RECIPES,
)
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process

TOPK = "topk(ratio=0.1)"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on two ranks."""
    return Scenes("tests.process.scenes_steps", 2, tmp_path_factory.mktemp("steps"))


METRICS = """
    backward_s backward_s_mean bytes_sent bytes_sent_mean compile_s compress_s compress_s_mean dense_bytes
    dropped_steps exposed_s exposed_s_mean health_warnings median_computing_s memory_bytes ratio ratio_mean
    residual_to_gradient share_of_linear skipped_steps slowest_computing_s slowest_rank step step_s
    step_s_mean
"""
ATTACHED = {
    "dense": "gradwire N: dense, N % of N kB, no memory",
    TOPK: "gradwire N: topk(ratio=N), N units, N % of N kB, memory N kB",
    "int4": "gradwire N: intN, N unit, N % of N kB, memory N kB",
}


@pytest.mark.parametrize("recipe", rest(TELLING_RECIPES, but=[TOPK]))
def test_a_fixed_recipe_tells_all_that_it_knows(world: Scenes, recipe: str) -> None:
    first, second = value(world, f"tells, {recipe}")
    for each in (first, second):
        assert each["report"] == sorted([*Report.__dataclass_fields__, "ratio"])
        lateness = ["late"] if recipe != "dense" else []  # it takes more steps to be known
        elsewhere = ["gather", "members", "modules"]  # FSDP2's own traffic, replicas that come and go
        assert each["unknown"] == sorted(
            [*lateness, *elsewhere, "choices", "diagnosis", "facts", "predicted_step_s", "times_led"]
        )
        assert each["metrics"] == METRICS.split()
        assert each["apart"] == [], "the report says otherwise"
        assert each["timeline"] == ["backward", "decode", "encode", "wait", "wire"]
        assert each["bytes"], "as many are metered as the plan says"
        assert each["timed"]
    attached, skipped, left_out = first["log"]
    assert attached == ATTACHED[recipe]
    assert skipped.startswith("step N is skipped: NaN, Inf or a gradient too large")
    assert left_out.startswith("step N is left out: its gradients were cleared")
    assert second["log"] == [], "rank 0 speaks for all"


@pytest.mark.parametrize("recipe", rest(TELLING_RECIPES, but=[TOPK]))
def test_it_tells_the_same_where_few_steps_are_timed(world: Scenes, recipe: str) -> None:
    found = value(world, f"tells, {recipe}, now and then")
    assert found == [{**each, "timed": False} for each in value(world, f"tells, {recipe}")]


@pytest.mark.parametrize(
    "scene", rest(LEFT_OUT, but=[(TOPK, "ddp", way) for way in ("clear", "flush and clear", "say it")])
)
def test_a_step_that_is_left_out_leaves_no_trace(world: Scenes, scene: tuple[str, str, str]) -> None:
    recipe, source, way = scene
    never = value(world, f"{recipe}, {source}, never")
    found = value(world, f"{recipe}, {source}, {way}")
    assert [each[:2] for each in found] == [each[:2] for each in never], "bit for bit, and in the same step"
    assert [each[2] for each in found] == [1, 1]
    assert [each[3] for each in found] == [1, 0], "rank 0 says so once"
    assert [each[2:] for each in never] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("scene", rest(RESUMED, but=[("ddp", "state")]))
def test_the_first_step_of_a_resumed_run_may_be_left_out(world: Scenes, scene: tuple[str, str]) -> None:
    source, way = scene
    for left_out, without in value(world, f"resumed, {source}, {way}"):
        assert left_out == [*without[:2], 1], "bit for bit, and in the same step"
        assert without[1:] == [6, 0]


@pytest.mark.parametrize("source", ["ddp", "plain"])
def test_a_resumed_run_leaves_out_what_one_that_never_stopped_does(world: Scenes, source: str) -> None:
    assert value(world, f"resumed, {source}, state") == value(world, f"resumed, {source}, never")


@pytest.mark.parametrize("way", rest(RISEN, but=["folder"]))
def test_a_resumed_run_finds_losses_that_rise_in_the_same_step(world: Scenes, way: str) -> None:
    found = value(world, f"losses, {way}")
    assert found == value(world, "losses, never")
    assert [sign for [(_step, sign)] in found] == 2 * ["the loss has risen from 1.01 to 2.01"]


def test_a_state_that_does_not_say_who_has_stepped_can_be_loaded(world: Scenes) -> None:
    for left_out, without in value(world, "resumed, ddp, older"):
        assert [left_out[1:], without[1:]] == [[7, 0], [6, 0]], "as before an optimizer's first step"


def test_a_run_that_goes_back_to_its_start_does_as_it_did(world: Scenes) -> None:
    found = value(world, "at the start, rewound")
    assert found == value(world, "at the start, never")
    assert [left_out[1:] for left_out, _ in found] == [[7, 0]] * 2


def test_several_exchanges_of_one_step_go_back_as_one(world: Scenes) -> None:
    never, found = value(world, f"{TOPK}, ddp, never"), value(world, f"{TOPK}, ddp, two exchanges")
    assert [each[:2] for each in found] == [each[:2] for each in never]
    assert [each[2] for each in found] == [1, 1]


def test_a_user_may_say_that_nothing_is_left_out(world: Scenes) -> None:
    assert value(world, "kept if asked") == [[3, 0], [3, 0]]


def test_many_left_out_in_a_row_say_that_something_else_steps(world: Scenes) -> None:
    lines, nothing = value(world, "many in a row")
    assert nothing == []
    assert [line.split()[0] for line in lines] == ["step", "10"]
    assert "something other than an optimizer" in lines[1]


@pytest.mark.parametrize("recipe", rest(RECIPES, but=[TOPK]))
def test_steps_of_another_optimizer_than_the_one_given_count(world: Scenes, recipe: str) -> None:
    given, found = value(world, f"the one given, {recipe}"), value(world, f"another optimizer, {recipe}")
    assert [each[:4] for each in found] == [each[:4] for each in given], "bit for bit, and one step left out"
    assert [each[3] for each in given] == [1, 1]
    for one, other in zip(found, given, strict=True):
        said = [line for line in one[4] if line not in other[4]]
        assert len(said) == (recipe != "dense"), "which goes by no optimizer and remembers nothing"
        assert all("SGD, which attach was not given" in line for line in said)


def test_a_detached_wire_knows_its_optimizer(world: Scenes) -> None:
    assert all("momentum" in text for text in value(world, "switched after detach"))


def test_after_detach_a_rank_may_leave_out_a_step_by_itself(world: Scenes) -> None:
    assert all(len(losses) == 4 for losses in value(world, "left out after detach"))


def test_recipes_go_by_the_optimizer_that_took_over(world: Scenes) -> None:
    for before, after in value(world, "goes by the other"):
        assert before > 0.9
        assert after < 0.1, "a rate of 1e-12 moves hardly any parameter"


def test_an_optimizer_inside_the_one_given_is_no_other(world: Scenes) -> None:
    assert value(world, "part of the one given") == [[0, []]] * 2


def test_another_optimizer_may_take_over(world: Scenes) -> None:
    ranks = value(world, "switches optimizer")
    assert [each[0] for each in ranks] == [True, True]
    assert [each[1] for each in ranks] == [["ValueError", "RanksDisagree", "ValueError"]] * 2
    assert [each[2:] for each in ranks] == [[True, 0, 0]] * 2


def test_steps_may_be_left_out_in_each_phase_of_auto(world: Scenes) -> None:
    first, second = value(world, "auto")
    assert first == second
    assert first[1:] == [12, 48]


def test_a_discriminator_moves_as_under_plain_ddp(world: Scenes) -> None:
    plain = {each["digest"] for each in value(world, "gan, ddp")}
    for recipe in ("dense", "lossless"):
        assert {each["digest"] for each in value(world, f"gan, {recipe}")} == plain


def test_within_its_bound_for_a_nearly_lossless_recipe(world: Scenes) -> None:
    exact, near = value(world, "gan, dense")[0]["d"], value(world, "gan, gcomp")[0]["d"]
    # Each of six steps of size 0.05 may be off by the 2^-13 of a gradient below 1 that gcomp may round away.
    assert max(abs(a - b) for a, b in zip(exact, near, strict=True)) <= 6 * 0.05 * 2**-13


@pytest.mark.parametrize("recipe", ["gcomp", "topk"])
def test_the_memory_of_a_discriminator_holds_nothing_of_the_generators_loss(
    world: Scenes, recipe: str
) -> None:
    for each in value(world, f"gan, {recipe}"):
        assert each["kept"] == [True] * 6
        assert each["lines"] == [], "nothing was left out: some parameters were"


@pytest.mark.parametrize("recipe", ["dense", "topk"])
def test_two_optimizers_may_step_at_different_times(world: Scenes, recipe: str) -> None:
    found = value(world, f"two optimizers, {recipe}")
    assert found[0] == found[1]
    assert found[0][1:4] == [8, 0, []]


def test_accumulated_passes_make_one_step(world: Scenes) -> None:
    # Before the optimizer's first step nobody knows that it will step: there both passes count.
    assert value(world, "accumulation") == [[2, 3, 4]] * 2


@pytest.mark.rest
@pytest.mark.parametrize("recipe", ["dense", "covap"])
def test_two_passes_per_step_train_every_element(world: Scenes, recipe: str) -> None:
    first, second = value(world, f"sharpness, {recipe}")
    assert first == second
    steps, _digest, share = first
    assert steps == 41, "40, and the first pass of all, before the optimizer had ever stepped"
    assert share == 1.0


@pytest.mark.parametrize("called", rest(CALLED, but=CALLED[::12]))
def test_a_step_that_is_left_out_is_recognised_however_the_model_is_called(
    world: Scenes, called: tuple[str, str, str]
) -> None:
    case, recipe, source = called
    like = CASES[case].like or case
    never, found = (value(world, f"{each}, {recipe}, {source}") for each in (f"never: {like}", case))
    assert [each[:2] for each in found] == [each[:2] for each in never], "bit for bit, and in the same step"
    assert [each[2] for each in found] == [1, 1]
    if recipe == "dense":
        assert [each[0] for each in found] == [each[0] for each in value(world, f"ddp: {like}")]
    said = [
        [line for line in each[3] if line not in other[3]] for each, other in zip(found, never, strict=True)
    ]
    (line,), nothing = said
    assert "left out" in line
    assert nothing == []
    assert not any("no_sync" in line for each in found for line in each[3])


@pytest.mark.rest
@pytest.mark.parametrize("source", ["ddp", "plain"])
@pytest.mark.parametrize("recipe", CASE_RECIPES)
@pytest.mark.parametrize("form", ["a tensor", "none"])
def test_the_first_half_of_a_sharpness_aware_step_is_dropped(
    world: Scenes, form: str, recipe: str, source: str
) -> None:
    inner = value(world, f"halves, inner given, {recipe}")
    found = value(world, f"halves, {form}, {recipe}, {source}")
    if source == "ddp":
        assert found == inner, "as if the optimizer inside were given"
    for digest, steps, lines in found:
        assert digest == found[0][0]
        assert steps == 41, "40, and the first half of all, before any optimizer had ever stepped"
        assert lines == []
        if recipe == "dense":
            assert digest == value(world, "halves, ddp")[0][0]


def test_a_half_that_brings_zeros_is_a_half_whichever_optimizer_is_given(world: Scenes) -> None:
    found = value(world, "halves, resting")
    assert found == value(world, "halves, inner given, resting")
    for digest, steps, lines in found:
        assert digest == found[0][0]
        assert steps == 41
        assert lines == []


def test_a_model_whose_outputs_cannot_be_seen_may_be_copied_and_deleted(world: Scenes) -> None:
    assert value(world, "a copy") == [[True] * 8] * 2


@pytest.mark.parametrize("source", ["ddp", "plain"])
def test_an_optimizer_that_steps_inside_backward_is_told_so(world: Scenes, source: str) -> None:
    for lines, raised in value(world, f"inside backward, {source}, 0"):
        assert raised == ""
        (line,) = [each for each in lines if "no gradient came" not in each]
        assert "stepped inside backward(), before the mean over ranks is there" in line
    for _lines, raised in value(world, f"inside backward, {source}, 4"):
        assert "stepped inside backward(), before the mean over ranks is there" in raised


def test_closures_are_inside_the_step(world: Scenes) -> None:
    assert value(world, "lbfgs") == [[True, 0], [True, 0]]


def test_what_a_scaler_leaves_out_leaves_no_trace(world: Scenes) -> None:
    assert value(world, "fused") == [[True, False, 1, 4]] * 2


def test_a_checkpoint_between_backward_and_step_belongs_to_the_parameters(world: Scenes) -> None:
    assert value(world, "saved in between") == [[True] * 4] * 2


def test_a_step_without_an_exchange_is_said_once(world: Scenes) -> None:
    for lines, raised in value(world, "unseen, around"):
        assert raised == ""
        (line,) = lines
        assert "never exchanged" in line
    for lines, raised in value(world, "unseen, guarded"):
        assert lines == []
        assert "never exchanged" in raised


@pytest.mark.parametrize("how", rest(["flag", "added, plain"], but=["flag"]))
def test_a_step_with_a_part_of_an_exchange_is_said_once(world: Scenes, how: str) -> None:
    for lines, raised in value(world, f"partly, {how}"):
        assert raised == ""
        (line,) = lines
        assert "only a part was exchanged" in line


def test_a_step_with_a_part_of_an_exchange_is_an_error_under_a_guard(world: Scenes) -> None:
    for lines, raised in value(world, "partly, guarded"):
        assert lines == []
        assert "only a part was exchanged" in raised


def test_a_pass_that_adds_nothing_after_an_exchange_is_no_such_case(world: Scenes) -> None:
    assert value(world, "partly, clipped") == [[[], ""]] * 2


@pytest.mark.parametrize("how", ["flush", "detach, around", "local_every"])
def test_steps_that_need_no_exchange_are_no_such_case(world: Scenes, how: str) -> None:
    assert value(world, f"unseen, {how}") == [[[], ""]] * 2


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        ("ranks differ", "a backward pass after a step that was left out"),
        pytest.param(
            "ranks differ, accumulating",
            "another backward pass before the optimizer's step",
            marks=pytest.mark.rest,
        ),
    ],
)
def test_ranks_that_differ_in_it_all_hear_of_it(world: Scenes, scene: str, said: str) -> None:
    for text in value(world, scene):
        assert said in text
        assert "rank 0: a training step" in text
