"""Real gloo ranks: what frameworks save for gradwire is taken up by each rank, or refused on all of them."""

from __future__ import annotations

import pytest

from tests.process.ranks import Results, perform, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All scenes, on three ranks."""
    return perform("tests.process.scenes_checkpoints", 3, tmp_path_factory.mktemp("checkpoints"))


def test_every_rank_writes_a_file_and_takes_up_its_own(world: Results) -> None:
    found = value(world, "files")
    for each in found:
        assert each["written"] == [f"gradwire-{rank}-of-3.pt" for rank in range(3)]
        assert (each["taken"], each["same"], each["step"]) == (True, True, 5)
    assert len({each["own"] for each in found}) == 3  # or any rank's file would do


def test_fewer_ranks_start_with_the_mean_and_leave_no_old_files(world: Results) -> None:
    for each in value(world, "files")[:2]:
        assert each["mean"]
        assert each["left"] == ["gradwire-0-of-2.pt", "gradwire-1-of-2.pt"]


def test_a_checkpoint_without_gradwire_is_gone_on_from_with_a_warning(world: Results) -> None:
    for said in value(world, "no files"):
        assert len(said) == 1
        assert "holds no state of gradwire" in said[0]


def test_a_broken_or_missing_file_is_refused_on_all_ranks(world: Results) -> None:
    first, damaged, last = value(world, "broken")
    assert damaged[0].startswith("ValueError no state of gradwire can be read from")
    for said in (first[0], last[0]):
        assert said.startswith("RanksDisagree ranks disagree on the checkpoint: rank 0: its own state")
        assert "rank 1: refused, " in said
    for said in (first[1], damaged[1], last[1]):
        assert "rank 1: 2 states of other ranks" in said


def test_rank_0_holds_all_states_and_every_rank_takes_up_its_own(world: Results) -> None:
    assert value(world, "gathered") == [{"held": held, "same": True} for held in (3, 0, 0)]
