"""Real gloo ranks, so many that the verdict goes by a tree."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comm import ProcessGroupComm, run_ranks
from gradwire.comm.base import DIRECT_WORLD, shortest_sum
from tests.laws.test_status_vote import told
from tests.support.models import digest, optimizer_of, perceptron, train
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.rest]

WORLD = DIRECT_WORLD + 1
STEPS = 5


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Ranks for all scenes."""
    assert shortest_sum(WORLD) == "tree"
    return Ranks(WORLD, tmp_path_factory.mktemp("nine"))


def verdicts() -> list[str]:
    """Every odd row of every rank."""
    return told(ProcessGroupComm(dist.group.WORLD))


@dataclass(frozen=True)
class Trained:
    """Steps with a verdict each."""

    digest: str
    step: int
    predicted_bytes: float
    metered_bytes: float


def trained() -> Trained:
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.1)")
    train(ddp, optimizer, range(STEPS))
    report = wire.report()
    return Trained(digest(ddp), report.step, report.wire_bytes_per_step, report.metered_bytes_per_step)


def test_every_rank_reads_what_threads_read(nine: Ranks) -> None:
    assert nine(verdicts) == run_ranks(WORLD, told)


def test_training_goes_on_with_the_bytes_that_are_predicted(nine: Ranks) -> None:
    found = nine(trained)
    assert len({rank.digest for rank in found}) == 1
    for rank in found:
        assert rank.step == STEPS
        assert rank.predicted_bytes == pytest.approx(rank.metered_bytes, rel=1e-12)
