"""Real gloo ranks: calls that only some of them make end in an error that names them, on all ranks."""

from __future__ import annotations

import pytest

from tests.support.ranks import TIMEOUT_S
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on two ranks, whose short messages all go by the same verb."""
    return Scenes("tests.faults.scenes_calls", 2, tmp_path_factory.mktemp("calls"))


def test_different_calls_are_named_on_all_ranks_and_training_goes_on(world: Scenes) -> None:
    found = value(world, "different calls")
    for name, (other, *_) in found[0]["said"].items():
        for each in found:
            _, kind, text, took_s = each["said"][name]
            assert kind == "RanksDisagree", name
            assert f"rank 0: {name} at step 3; rank 1: {other} at step 3" in text
            assert took_s < TIMEOUT_S / 2
    assert found[0]["digest"] == found[1]["digest"]
    assert [each["step"] for each in found] == [6, 6]


def test_a_call_that_fails_on_one_rank_fails_on_all_and_changes_nothing(world: Scenes) -> None:
    first, second = value(world, "fails on one rank")
    could_not = {
        "flush": "add what is unsent to its gradients",
        "detach": "add what is unsent to its gradients",
        "switch": "switch",
        "diagnose, before": "diagnose",
        "diagnose, a choice": "diagnose",
    }
    for name, what in could_not.items():
        kind, text, took_s, untouched = first["said"][name]
        assert (kind, text) == ("PeerFailed", f"rank 1 could not {what}: MemoryError: none left"), name
        assert took_s < TIMEOUT_S / 2, "long before the timeout"
        assert second["said"][name][:2] == ["MemoryError", "none left"], "its own cause"
        assert untouched, name
        assert second["said"][name][3], name
    assert first["digest"] == second["digest"]
    assert first["step"] == second["step"] == 3 + len(could_not), "training goes on"
    assert first["runs"].startswith("topk"), "with the recipe that it had"


@pytest.mark.parametrize("call", rest(["load_state_dict(missing='refuse')", "flush()"], but=["flush()"]))
def test_a_call_on_one_rank_while_another_trains_is_named_on_both(world: Scenes, call: str) -> None:
    for kind, text, took_s, again, said_again, untouched in value(
        world, f"{call.split('(')[0].split('_')[0]} against step"
    ):
        assert kind == "RanksDisagree"
        assert f"rank 0: {call} at step 3; rank 1: a training step" in text
        assert took_s < TIMEOUT_S / 2, "long before the timeout"
        assert again in ("RanksDisagree", "GradwireError"), "the order of collectives is lost"
        assert "tart all ranks again" in said_again
        assert untouched


def test_replicas_that_part_are_named_in_the_next_step_that_looks(world: Scenes) -> None:
    for without, guarded in value(world, "replicas part"):
        assert [kind for kind, _ in without] == ["nothing", "nothing"], "as plain DDP, which cannot know"
        assert [kind for kind, _ in guarded] == ["nothing", "RanksDisagree"]
        assert "before step 4: '2.weight' on rank 1" in guarded[1][1]


def test_a_call_that_a_rank_never_makes_ends_at_the_timeout_and_is_named(world: Scenes) -> None:
    (kind, text, took_s), _ = value(world, "nothing")
    assert kind == "TransportError"
    assert "flush() at step 3 waited" in text
    assert "for rank 1, which made no call" in text
    assert 2.0 < took_s < TIMEOUT_S / 2
