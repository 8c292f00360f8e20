"""Real gloo ranks: a model that changes under gradwire, or a pass that breaks off, is an error in words."""

from __future__ import annotations

import pytest

from tests.support.ranks import TIMEOUT_S
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on two ranks."""
    return Scenes("tests.faults.scenes_modules", 2, tmp_path_factory.mktemp("modules"))


SAYS = {
    "assigned": "'4.bias' was replaced; '4.weight' was replaced; '2.bias' was replaced; and 3 more.",
    "replaced": "'2.weight' was replaced.",
    "appended": "'5.weight' was added; '5.bias' was added.",
    "cast for good": "'4.bias' is bfloat16 (8,) on cpu, and was float32 (8,) on cpu;",
}


SAYS_OF_SHARDS = {
    "assigned": "'norm.bias' was replaced; 'norm.weight' was replaced; 'never.bias' was replaced; and 8 more",
    "replaced": "'blocks.1.weight' was replaced.",
    "appended": "'blocks.1.more.weight' was added; 'blocks.1.more.bias' was added.",
}


CHANGED = {
    **{(change, source): says for change, says in SAYS.items() for source in ("plain", "ddp")},
    **{(change, "sharded"): says for change, says in SAYS_OF_SHARDS.items()},
}


@pytest.mark.parametrize(
    "changed", rest(CHANGED, but=[("assigned", "ddp"), ("replaced", "plain"), ("appended", "sharded")])
)
def test_parameters_that_changed_are_named_on_all_ranks_before_the_next_exchange(
    world: Scenes, changed: tuple[str, str]
) -> None:
    (change, source), says = changed, CHANGED[changed]
    for kind, text, _, steps in value(world, f"{change}, {source}"):
        assert kind == "ValueError"
        assert says in text
        assert "use load_state_dict without assign=True" in text
        assert steps == 2


def test_a_cast_and_back_changes_nothing_that_counts(world: Scenes) -> None:
    for kind, text, _, steps in value(world, "cast and back"):
        assert (kind, text, steps) == ("nothing", "", 3)


@pytest.mark.parametrize(
    ("source", "name"),
    [("plain", "'2.weight'"), ("ddp", "'5.weight'"), ("sharded", "'blocks.1.more.weight'")],
)
def test_a_change_on_one_rank_is_named_on_the_ranks_that_wait(world: Scenes, source: str, name: str) -> None:
    (waits, heard, took_s, steps), (refuses, text, _, _) = value(world, f"on one rank, {source}")
    assert (waits, refuses) == ("RanksDisagree", "ValueError")
    assert name in text
    assert "rank 0: a training step; rank 1: a forward pass that it refuses" in heard
    assert name in heard
    assert took_s < TIMEOUT_S / 2, "long before the timeout"
    assert steps == 2


@pytest.mark.parametrize("recipe", rest(["dense", "topk(ratio=0.1)"], but=["topk(ratio=0.1)"]))
@pytest.mark.parametrize("buckets", rest([1, 4], but=[4]))
def test_after_a_caught_exception_no_pass_completes_another_step(
    world: Scenes, recipe: str, buckets: int
) -> None:
    broke, waited = value(world, f"broke off, {recipe}, {buckets}")
    assert [kind for kind, _ in broke["said"]] == ["RuntimeError", "GradwireError", "GradwireError"]
    for _, text in broke["said"][1:]:
        assert text.startswith("a backward pass broke off before all gradients were there")
    assert [kind for kind, _ in waited["said"]] == ["RanksDisagree"], "and not the timeout"
    assert "rank 0: a backward pass after one that broke off; rank 1: a training step" in waited["said"][0][1]
    assert broke["steps"] == waited["steps"] == 1


def test_a_pass_that_broke_off_before_its_first_gradient_has_begun_no_step(world: Scenes) -> None:
    assert value(world, "before any gradient") == [{"said": "boom", "steps": 2}] * 2


def test_a_pass_of_one_rank_that_broke_off_before_its_first_gradient_pairs_with_no_other(
    world: Scenes,
) -> None:
    for kind, text, took_s, steps in value(world, "before any gradient of one"):
        assert kind == "RanksDisagree"
        assert "rank 0: a backward pass after one that broke off before its first gradient at step 1" in text
        assert "rank 1: a training step" in text
        assert took_s < TIMEOUT_S / 2, "long before the timeout"
        assert steps == 1


def test_a_pass_that_would_not_have_been_exchanged_may_break_off(world: Scenes) -> None:
    for kind, text, _, steps in value(world, "before any gradient, without sync"):
        assert (kind, text, steps) == ("nothing", "", 1)


def test_the_guard_sees_frozen_parameters_as_they_are_now(world: Scenes) -> None:
    for kind, text, _ in value(world, "guarded, replaced"):
        assert kind == "RanksDisagree"
        assert "before step 1: '0.weight' on rank 1 (" in text
    for kind, text, _ in value(world, "guarded, added"):
        assert kind == "RanksDisagree"
        assert "the parameters that guard_every compares: rank 0: 6: " in text
        assert "rank 1: 8: " in text
    one, other = value(world, "trains")
    assert one == other
