"""Captured kernels under DDP, on real ranks with a simulated device: the bits of eager steps."""

from __future__ import annotations

import pytest

from tests.gpu.scenes_graphs import CAPTURED, LIVES, compared, plain
from tests.support.tiers import rest
from tests.support.world import Ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("captured"))


@pytest.mark.parametrize("life", rest(LIVES, but=("saved and loaded",)))
@pytest.mark.parametrize("recipe", rest(CAPTURED.values(), but=(CAPTURED["powersgd"],)))
def test_a_training_whose_kernels_are_captured_has_the_bits_of_one_without(
    two: Ranks, recipe: str, life: str
) -> None:
    one, other = two(compared, recipe, LIVES[life])
    assert one["wrong"] == other["wrong"] == ""
    assert one["digest"] == other["digest"]


@pytest.mark.rest
def test_a_rank_that_captures_trains_with_one_that_does_not(two: Ranks) -> None:
    one, other = two(compared, CAPTURED["topk"], plain, on_all_ranks=False)
    assert one["wrong"] == other["wrong"] == ""
    assert one["digest"] == other["digest"]
