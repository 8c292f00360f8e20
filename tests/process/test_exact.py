"""Real gloo ranks: exact gathers beside stock FSDP2 with the same policy, bit for bit."""

from __future__ import annotations

import pytest

from tests.process.scenes_exact import PLAIN
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """The scenes on two ranks."""
    return Scenes("tests.process.scenes_exact", 2, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """The scenes on four ranks."""
    return Scenes("tests.process.scenes_exact", 4, tmp_path_factory.mktemp("exact of four"))


@pytest.mark.parametrize("scene", rest(PLAIN, but=["AdamW", "dropped"]))
def test_every_bit_is_stock_fsdp2s(two: Scenes, scene: str) -> None:
    for found in value(two, scene):
        assert found["same"]
        assert found["alike"]
        assert "exact: changes" in found["kinds"]
        assert "of gathered parameters on every rank" in found["text"]


ON_FOUR = ["AdamW", "accumulated", "gathered again over two", "by nodes, dropped"]


@pytest.mark.rest
@pytest.mark.parametrize(
    "scene",
    [*ON_FOUR, *(pytest.param(each, marks=pytest.mark.full) for each in PLAIN if each not in ON_FOUR)],
)
def test_on_four_ranks_too(four: Scenes, scene: str) -> None:
    for found in value(four, scene):
        assert found["same"]
        assert found["alike"]


@pytest.mark.rest
def test_by_nodes_a_rank_holds_the_part_of_its_place(four: Scenes) -> None:
    for found, other in zip(value(four, "by nodes"), value(four, "AdamW"), strict=True):
        assert found["same"]
        assert found["alike"]
        assert found["held"] == other["held"] // 2


@pytest.mark.rest
def test_a_run_resumes_bit_for_bit_and_gathers_may_be_switched(two: Scenes) -> None:
    assert all(found["same"] for found in value(two, "resumed"))
    for found in value(two, "switched"):
        assert [any("exact" in kind for kind in each) for each in found["kinds"]] == [True, False, True]


@pytest.mark.rest
def test_many_modules_that_are_gathered_far_ahead_have_the_bits_of_stock(two: Scenes) -> None:
    for found in value(two, "each alone"):
        assert found["same"]
        assert "exact: changes" in found["kinds"]


@pytest.mark.rest
def test_a_switch_of_the_recipe_keeps_what_is_held(two: Scenes) -> None:
    for found in value(two, "switched in between"):
        assert found == {"same": True, "kinds": ["exact: changes", "exact: unchanged"]}


@pytest.mark.rest
def test_a_run_that_dcp_has_saved_goes_on_in_another_world(four: Scenes) -> None:
    for found in value(four, "in another world"):
        assert found["same"]
        assert "exact: changes" in found["kinds"]


@pytest.mark.rest
def test_the_lab_s_transformer_has_the_bits_of_stock_for_less_than_a_third_of_its_bytes(two: Scenes) -> None:
    for found in value(two, "of text"):
        assert found["same"]
        assert found["of stock"] < 1 / 3, "with the first gather, in which all goes as it is"


def test_nothing_keeps_what_was_gathered(two: Scenes) -> None:
    for found in value(two, "let go"):
        assert found == {"waited for": True, "switched": True, "detached": True}


def test_what_cannot_be_exact_is_refused_with_what_to_write(two: Scenes) -> None:
    for found in value(two, "refused"):
        assert "param_dtype=torch.bfloat16" in found["float32"]
        assert 'held_on= is for gather="exact"' in found["held_on"]
        assert "guard_every= is for" in found["guard_every"]
        assert "held_on='disk'" in found["nowhere"]
        for name in ("mixed, exact", "mixed, int8"):
            assert "gathered as raw bytes, because it has torch.bfloat16 and torch.float32" in found[name]
