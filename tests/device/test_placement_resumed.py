"""Placements on real ranks: states, failures and compared replicas, with the CPU's bits."""

from __future__ import annotations

import pytest

from tests.device.scenes_resumed import PLACES, SAVED, SAVES, STEPS, fails, guarded, resumes
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE
from tests.support.world import Ranks

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("resumed"))


@looped(("name", "placed"), SAVES)
def test_what_is_saved_before_its_step_is_committed_resumes_with_the_cpus_bits(
    two: Ranks, name: str, placed: str
) -> None:
    for rank in two(resumes, EVERY_RECIPE[name], placed):
        assert rank["placement"] == placed
        assert rank["numbers"] == [SAVED - 1] * 4, "the step that was not finite does not count"
        assert rank["remembers"]
        assert rank["same memory"]
        assert rank["same mean"]
        assert rank["resumed"] == rank["rewound"] == rank["through"]
        assert rank["step"] == STEPS - 1
        assert rank["races"] == []


@looped("placed", PLACES)
def test_an_encode_that_fails_is_heard_of_in_the_same_step_and_leaves_the_cpus_bits(
    two: Ranks, placed: str
) -> None:
    ranks = two(fails, EVERY_RECIPE["topk"], placed)
    assert [rank["there"]["kind"] for rank in ranks] == ["PeerFailed", "MemoryError"]
    for rank in ranks:
        assert rank["there"]["spoilt"], "no half of a step is taken for one"
        assert rank["there"]["counted"] == [1, STEPS - 1], "one step of the first two was not finite"
        assert rank["there"] == rank["here"]


@looped("placed", PLACES)
def test_replicas_are_compared_in_order_with_what_the_users_stream_writes(two: Ranks, placed: str) -> None:
    for rank in two(guarded, placed):
        assert f"parameters differ between ranks before step {STEPS - SAVED}: " in rank["text"]
        assert rank["races"] == []
