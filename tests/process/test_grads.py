"""Real gloo ranks: whatever memory a loop puts behind its gradients, parameters or θ₀, averaging goes on."""

from __future__ import annotations

import pytest

from tests.process.scenes_grads import OF_FOUR, RECIPES
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Scenes of two ranks."""
    return Scenes("tests.process.scenes_grads", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Scenes of four ranks, which are two nodes."""
    return Scenes("tests.process.scenes_grads", 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)"]))
@pytest.mark.parametrize("source", rest(["plain", "ddp", "ddp, views"], but=["ddp, views"]))
def test_other_memory_behind_gradients_changes_no_bit(two: Scenes, source: str, recipe: str) -> None:
    # Zero tolerance: in place the same numbers are computed, and two addends commute, so dense is DDP.
    assert value(two, f"{source}, {recipe}") == [{}, {}]


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)"]))
def test_hooks_that_come_after_ours_part_nothing_where_no_output_is_seen(two: Scenes, recipe: str) -> None:
    assert value(two, f"unseen hooks, {recipe}") == [True, True]


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)"]))
def test_an_outer_optimizer_may_move_shared_parameters_and_a_loop_its_own(two: Scenes, recipe: str) -> None:
    assert value(two, f"outer, {recipe}") == [{}, {}]


@pytest.mark.rest
@pytest.mark.parametrize("scene", OF_FOUR)
def test_so_it_is_with_shards_and_on_nodes(four: Scenes, scene: str) -> None:
    assert value(four, scene) == [{}] * 4


def test_a_fused_optimizer_finds_gradients_in_the_order_of_the_parameters(two: Scenes) -> None:
    # A convolution adds up in another order there: a few roundings (eps = 1.2e-7) of numbers below 1 in each
    # of five steps. Gradients in the wrong order are off by 1e-2.
    for found in value(two, "fused"):
        assert found["alike"]
        assert found["apart"] < 1e-6


def test_error_bounds_are_those_of_the_elements_in_whatever_order_a_parameter_is(two: Scenes) -> None:
    assert value(two, "bounded") == [{"alike": True, "same": True}] * 2


@pytest.mark.parametrize("source", ["ddp", "ddp, views"])
def test_all_ranks_hear_where_a_cast_has_taken_the_hooks_of_ddp(two: Scenes, source: str) -> None:
    assert value(two, f"cast, {source}") == [True, True]


@pytest.mark.parametrize("source", rest(["ddp", "ddp, views"], but=["ddp"]))
def test_all_ranks_hear_where_parameters_under_ddp_are_in_another_order(two: Scenes, source: str) -> None:
    other, here = value(two, f"reordered, {source}")
    assert "ValueError: parameters of this model have changed since attach: 'conv.weight' has strides" in here
    assert "RanksDisagree" in other
    assert "a forward pass that it refuses" in other
