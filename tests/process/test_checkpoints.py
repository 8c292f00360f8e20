"""Real gloo ranks: what frameworks save for gradwire is taken up by each rank, or refused on all of them."""

from __future__ import annotations

import pytest

from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on three ranks."""
    return Scenes("tests.process.scenes_checkpoints", 3, tmp_path_factory.mktemp("checkpoints"))


def test_every_rank_writes_a_file_and_takes_up_its_own(world: Scenes) -> None:
    found = value(world, "files")
    for each in found:
        assert [name[-15:] for name in each["written"]] == [f"-rank-{rank}-of-3.pt" for rank in range(3)]
        assert (each["taken"], each["same"], each["step"]) == (True, True, 5)
    assert len({each["own"] for each in found}) == 3  # or any rank's file would do


def test_fewer_ranks_start_with_the_mean_and_leave_no_old_files(world: Scenes) -> None:
    for each in value(world, "files")[:2]:
        assert each["mean"]
        assert [name[-15:] for name in each["left"]] == ["-rank-0-of-2.pt", "-rank-1-of-2.pt"]


def test_a_checkpoint_without_gradwire_is_gone_on_from_with_a_warning(world: Scenes) -> None:
    for said in value(world, "no files"):
        assert len(said) == 1
        assert "holds no state of gradwire" in said[0]


def test_a_broken_or_missing_file_is_refused_on_all_ranks(world: Scenes) -> None:
    said = value(world, "broken")
    assert [each[0].split()[0] for each in said] == ["PeerFailed", "ValueError", "PeerFailed"]
    assert "cannot be read" in said[1][0]
    for each in said:
        assert each[1].startswith("FileNotFoundError")
        assert "is not whole" in each[1]


def test_rank_0_holds_all_states_and_every_rank_takes_up_its_own(world: Scenes) -> None:
    assert value(world, "gathered") == [{"held": held, "same": True} for held in (3, 0, 0)]
