"""Host placement on real ranks: trainings on a simulated device, and errors that all ranks hear of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.scenes_placed import CALLS, STEPS, TRAINED
from tests.support.ranks import Results, perform, value


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return perform("tests.device.scenes_placed", 2, tmp_path_factory.mktemp("placed"))


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_by_way_of_the_host_is_the_cpus_bit_for_bit(results: Results, name: str) -> None:
    ranks = value(results, f"trains {name}")
    assert len({rank["there"]["digest"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["races"] == []
        assert rank["operators"] > 100 * STEPS, "somebody has watched"
        same = ("digest", "buffers", "step", "skipped", "placement")
        assert {key: rank["there"][key] for key in same} == {key: rank["here"][key] for key in same}
        assert rank["there"]["step"] == STEPS - 1
        assert rank["there"]["skipped"] == 1
        assert rank["there"]["pinned"] >= rank["gradient_bytes"]
        assert rank["there"]["copied_s"] > 0.0
        assert rank["here"]["pinned"] == rank["here"]["copied_s"] == 0


@pytest.mark.parametrize("calls", CALLS, ids=str)
def test_each_order_that_a_training_relies_on_is_missed(results: Results, calls: tuple[str, ...]) -> None:
    assert all(rank["races"] for rank in value(results, f"deaf to {' and '.join(calls)}"))


def test_a_backward_pass_that_is_captured_fails_on_all_ranks_and_training_goes_on(results: Results) -> None:
    other, own = value(results, "captured")
    assert own["kind"] == "GradwireError"
    assert "captured into a graph" in own["text"]
    assert other["kind"] == "PeerFailed"
    assert own["step"] == other["step"] == 2


@pytest.mark.parametrize(("scene", "field"), [("mixed world", "device"), ("mixed placements", "placement")])
def test_ranks_that_differ_are_refused_on_all(results: Results, scene: str, field: str) -> None:
    for rank in value(results, scene):
        assert rank["kind"] == "RanksDisagree"
        assert f"disagree on {field}" in rank["text"]


def test_a_group_that_one_rank_cannot_make_is_an_error_on_all_and_the_next_attach_works(
    results: Results,
) -> None:
    ranks: list[dict[str, Any]] = value(results, "unreachable")
    for rank in ranks:
        assert rank["kind"] == "TransportError"
        assert "could not connect ranks [1]: set GLOO_SOCKET_IFNAME" in rank["text"]
        assert rank["step"] == 1
