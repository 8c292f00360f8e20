"""Real gloo ranks: a module that nothing wraps trains as under DDP, and its loops are free to do more."""

from __future__ import annotations

import pytest

from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on two ranks."""
    return Scenes("tests.process.scenes_plain", 2, tmp_path_factory.mktemp("plain"))


BESIDE = {
    "beside ddp, dense": 6,
    "beside ddp, topk(ratio=0.1)": 6,
    "beside ddp, int8": 6,
    "beside ddp, kept": 4,
    "beside ddp, accumulating": 3,
    "beside ddp, sending each": 5,
}
"""By scene, how many steps were made; several exchanges before an optimizer steps are one."""


@pytest.mark.parametrize("scene", BESIDE)
def test_parameters_and_buffers_are_those_of_ddp_bit_for_bit(world: Scenes, scene: str) -> None:
    # Zero tolerance: two addends commute, and what codecs see does not depend on buckets.
    one, other = value(world, scene)
    assert one["as ddp"]
    assert other["as ddp"]
    assert one["digest"] == other["digest"]
    assert one["steps"] == BESIDE[scene]


def test_what_adds_up_in_old_buckets_is_sent_in_those_of_a_recipe_switched_to(world: Scenes) -> None:
    assert value(world, "switched within accumulation") == 2 * [
        {"close": True, "finer": [False, True, False]}
    ]


@pytest.mark.parametrize("recipe", ["dense", "int4", "topk(0.05)"])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_what_all_ranks_load_between_two_steps_is_trained_on(world: Scenes, kind: str, recipe: str) -> None:
    one, other = value(world, f"loading, {kind}, {recipe}")
    assert one["digest"] == other["digest"]
    assert one["as ddp"] == other["as ddp"] == (recipe == "dense")


def test_what_one_rank_loads_parts_replicas_and_a_guard_says_so(world: Scenes) -> None:
    one, other = value(world, "loading by one")
    assert one["raised"] == other["raised"] == ""
    assert one["digest"] != other["digest"]
    for each in value(world, "loading by one, guarded"):
        assert each["raised"].startswith("parameters differ between ranks before step 2")


def test_buffers_are_rank_0s(world: Scenes) -> None:
    one, other = value(world, "beside ddp, dense")
    assert len(one["buffers"]) == 3
    assert one["buffers"] == other["buffers"]


def test_all_ranks_get_the_mean_where_some_or_all_have_no_gradient(world: Scenes) -> None:
    one, other = value(world, "unused")
    assert one["some"] == other["some"] > 0
    assert one["never"] == other["never"] == 0


@pytest.mark.parametrize("scene", ["checkpointed", "checkpointed, reentrant"])
def test_checkpoints_of_either_kind_change_nothing(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [{"same": True, "steps": 6}] * 2


def test_a_backward_pass_is_one_step_whatever_was_run_before_it(world: Scenes) -> None:
    assert value(world, "twice through") == [{"same": True, "steps": 1}] * 2


def test_a_nan_on_one_rank_stops_the_step_on_both(world: Scenes) -> None:
    one, other = value(world, "poisoned")
    assert one == other == {"nan": True, "kept": True, "steps": 12, "digest": one["digest"]}


def test_a_run_resumes_bit_for_bit(world: Scenes) -> None:
    assert value(world, "resumed") == [{"same": True}] * 2


def test_flush_and_detach(world: Scenes) -> None:
    one, other = value(world, "flushed")
    assert one == other
    assert one["late"]
    assert one["recipe"] == "dense"


def test_auto_measures_and_decides(world: Scenes) -> None:
    one, other = value(world, "adaptive")
    assert one == other
    assert not one["measuring"]


def test_a_copy_sends_nothing(world: Scenes) -> None:
    assert value(world, "copied") == [{"steps": 1, "hooks": 0}] * 2


@pytest.mark.parametrize("scene", ["forgotten", "forgotten, but for its parameters"])
def test_a_model_that_nobody_holds_frees_its_memory(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [True, True]


REFUSED = {
    "bare": "wrap it in DistributedDataParallel first, or pass replicas=",
    "twice": "over ranks [0, 1]: for another recipe, call wire.switch(recipe)",
    "under ddp": "would exchange its gradients a second time",
    "ddp": "has its own process group",
    "around ddp": "'0' inside this module is wrapped in DistributedDataParallel",
    "mesh": "a mesh of 2 dimensions: pass one of them",
    "group": "got 'world'",
}


def test_what_cannot_be_is_refused_with_what_to_do(world: Scenes) -> None:
    for found in value(world, "refused"):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
