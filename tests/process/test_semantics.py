"""Real gloo ranks: uneven inputs, loss scales, accumulation, flush and detach."""

from __future__ import annotations

import pytest

from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on three ranks."""
    return Scenes("tests.process.scenes_semantics", 3, tmp_path_factory.mktemp("semantics"))


@pytest.mark.parametrize("inputs", ["uneven", "one batch", "no batch"])
def test_join_with_uneven_inputs_gives_what_plain_ddp_gives(world: Scenes, inputs: str) -> None:
    plain, ours = value(world, f"{inputs}, ddp"), value(world, f"{inputs}, dense")
    assert {each["digest"] for each in ours} == {each["digest"] for each in plain}


@pytest.mark.parametrize("scene", ["uneven, lossy", "uneven, covap", "one batch, lossy", "no batch, lossy"])
def test_a_finished_rank_keeps_its_memory_and_its_replica_in_step(world: Scenes, scene: str) -> None:
    found = value(world, scene)
    assert all(each["memory_kept"] for each in found)
    assert any(each["remembers"] for each in found)
    assert len({each["digest"] for each in found}) == 1
    assert len({each["steps"][1] for each in found}) == 1, "finished ranks count the others' steps"


def test_a_recipe_may_decide_when_a_rank_has_finished(world: Scenes) -> None:
    found = value(world, "decided without it")
    assert len({each["digest"] for each in found}) == 1
    assert [each["steps"][1] for each in found] == [9, 9, 9]


def test_join_that_divides_by_what_is_left_is_refused(world: Scenes) -> None:
    assert all("divide_by_initial_world_size" in text for text in value(world, "initial world size"))


@pytest.mark.parametrize("scene", rest(["overflow, lossy", "overflow, dense"], but=["overflow, lossy"]))
def test_an_overflow_on_one_rank_is_skipped_by_every_scaler(world: Scenes, scene: str) -> None:
    found = value(world, scene)
    for each in found:
        assert each["scales"] == found[0]["scales"]
        assert each["scales"][10] == each["scales"][9] / 2, "the overflow"
        assert each["scales"][9] > each["scales"][0], "scales had changed before"
        assert not each["moved"][10]
        assert each["moved"][9]
        assert each["moved"][11]
        assert each["losses"][1] < 0.5 * each["losses"][0]
        assert each["warnings"] == []
    assert len({each["digest"] for each in found}) == 1


def test_an_overflow_leaves_the_memory_as_it_was(world: Scenes) -> None:
    for each in value(world, "overflow, lossy"):
        assert each["kept"][10]
        assert not each["kept"][9]
        assert not each["kept"][11]


def test_float16_autocast_without_a_scaler_is_refused_at_the_first_step(world: Scenes) -> None:
    assert all("scaler=" in text for text in value(world, "float16 without scaler"))
    assert value(world, "bfloat16 without scaler") == ["", "", ""]


def test_accumulation_without_no_sync_warns_once(world: Scenes) -> None:
    for texts in value(world, "accumulation"):
        (text,) = texts
        assert text.startswith("2 backward passes")
        assert "no_sync" in text


@pytest.mark.parametrize("scene", ["accumulation under no_sync", "accumulation, dense", "resumed"])
def test_who_does_not_compress_micro_batches_is_not_warned(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [[], [], []]


def test_clipping_sees_the_same_norm_on_all_ranks(world: Scenes) -> None:
    found = value(world, "clipping")
    assert all(each == found[0] for each in found)


def test_flush_hands_over_exactly_what_was_left_behind(world: Scenes) -> None:
    for scene in ("flush", "flush of a low-pass memory"):
        assert value(world, scene) == 3 * [{"waits": True, "close": True, "forgotten": True}]
    assert value(world, "flush with scaler") == [True, True, True]


@pytest.mark.parametrize("scene", ["detach", "detach with policy"])
def test_after_detach_it_is_plain_ddp(world: Scenes, scene: str) -> None:
    found = value(world, scene)
    assert all(each == found[0] for each in found)
    assert found[0]["close"]
    assert found[0]["memory"] == 0
    assert found[0]["recipe"] == "dense"


def test_a_recipe_after_detach_goes_by_the_policy(world: Scenes) -> None:
    for before, detached, after in value(world, "policy after detach"):
        assert detached == []
        assert before
        assert after == before


def test_exchanging_after_backward_changes_no_number(world: Scenes) -> None:
    assert value(world, "overlap off") == [True, True, True]


@pytest.mark.parametrize("scene", ["forgotten", "forgotten, with a hook"])
def test_a_model_that_nobody_holds_frees_its_memory(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [True, True, True]
