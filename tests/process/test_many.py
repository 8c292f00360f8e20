"""Real gloo ranks, so many that the verdict goes by a tree."""

from __future__ import annotations

import pytest

from gradwire.comm import run_ranks
from gradwire.comm.base import DIRECT_WORLD, shortest_sum
from tests.laws.test_status_vote import told
from tests.support.world import Scenes, value

pytestmark = [pytest.mark.process, pytest.mark.rest]

WORLD = DIRECT_WORLD + 1


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes."""
    assert shortest_sum(WORLD) == "tree"
    return Scenes("tests.process.scenes_many", WORLD, tmp_path_factory.mktemp("nine"))


def test_every_rank_reads_what_threads_read(nine: Scenes) -> None:
    assert value(nine, "verdicts") == run_ranks(WORLD, told)


def test_training_goes_on_with_the_bytes_that_are_predicted(nine: Scenes) -> None:
    found = value(nine, "trains")
    assert len({each["digest"] for each in found}) == 1
    for each in found:
        assert each["step"] == 5
        assert each["sent"][0] == pytest.approx(each["sent"][1], rel=1e-12)
