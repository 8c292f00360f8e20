"""Real processes: rounds over a folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from gradwire.members.bucket.objects import Bucket
from gradwire.members.bucket.progress import living, sealed
from tests.process.scenes_store import INSIDE, RECIPES, SCENES, SITE
from tests.support.source import ROOT
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytest.importorskip("obstore")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On two ranks."""
    return Scenes("tests.process.scenes_store", 2, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On three ranks."""
    return Scenes("tests.process.scenes_store", 3, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On four ranks."""
    return Scenes("tests.process.scenes_store", 4, tmp_path_factory.mktemp("four"))


SAME = {"same": True, "moves": True}
BESIDE = [name for name in SCENES if name not in ("refused", *INSIDE, *SITE)]


@pytest.mark.parametrize("scene", rest(BESIDE, but=["sparseloco, 0"]))
def test_rounds_over_a_folder_are_those_of_replicas_bit_for_bit(world: Scenes, scene: str) -> None:
    assert value(world, scene) == [SAME] * 2


@pytest.mark.rest
@pytest.mark.parametrize("scene", [f"{recipe}, 0" for recipe in RECIPES])
def test_so_are_those_of_three(three: Scenes, scene: str) -> None:
    assert value(three, scene) == [SAME] * 3


@pytest.mark.parametrize("scene", rest(INSIDE, but=["fsdp2, sparseloco, 0"]))
def test_sites_of_two_ranks_take_the_rounds_of_replicas_bit_for_bit(four: Scenes, scene: str) -> None:
    assert value(four, scene) == [SAME] * 4


@pytest.mark.rest
def test_a_site_of_two_ranks_trains_alone_until_one_of_a_single_rank_is_there(world: Scenes) -> None:
    found = {"before": [0, 7, ["alone"]], "after": [1, ["a", "b"], 1, True]}
    assert value(world, "alone") == [found] * 2


def test_the_first_rank_of_a_site_decides_when_rounds_by_time_come(world: Scenes) -> None:
    assert value(world, "paced") == [[2, 10, 18]] * 2


def test_ranks_of_a_site_that_were_asked_otherwise_are_refused_together(world: Scenes) -> None:
    first, second = value(world, "asked otherwise")
    for every, name, recipe in (first, second):
        assert re.match(r"RanksDisagree: ranks disagree on every: rank 0: 2 .*; rank 1: 3 ", every)
        assert re.match(r"RanksDisagree: ranks disagree on name: rank 0: site-0 .*; rank 1: site-1 ", name)
        assert "int4(block=128, feedback=True, collective='all_reduce') needs several messages" in recipe
    assert [each[2].partition(":")[0] for each in (first, second)] == ["PeerFailed", "ValueError"]


@pytest.mark.rest
def test_all_ranks_of_a_site_hear_that_another_process_has_its_name(world: Scenes) -> None:
    for told in value(world, "named twice"):
        assert told.startswith("GradwireError: another process has taken the name 'a' of this replica")


@pytest.mark.rest
def test_a_site_by_fsdp2_goes_on_from_its_save_and_from_the_folder_alone(world: Scenes) -> None:
    found = {"same": True, "rounds": 3, "moves": True, "from the folder": [True, 3]}
    assert value(world, "saved") == [found] * 2


def test_recipes_whose_replicas_answer_each_other_are_refused_in_words(world: Scenes) -> None:
    for found in value(world, "refused"):
        assert len(found) == 4
        assert all("take one in which each replica's payload is made without the others" in e for e in found)


SITE = """
import sys
import time
from pathlib import Path

import torch
import gradwire

name, folder, saves = sys.argv[1:]
model = torch.nn.Linear(20, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
members = gradwire.members.store(
    folder, name, at_least=1, beat_s=1.0, patience_s=60.0, snapshot_every=3, wait_s=300.0
)
wire = gradwire.outer(model, optimizer, "topk(ratio=0.2)", every=4, members=members, resume=saves)
landed = 0
while not Path(folder + ".stop").exists():
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    if wire.attempts % 6 == 0:
        wire.save(saves)
    if landed != wire.report().rounds_committed:
        landed = wire.report().rounds_committed
        if wire.members == ("site-a", "site-b"):
            print(wire.rounds, flush=True)
    time.sleep(0.02)
wire.detach()
print("end", flush=True)
"""
BOTH = ["site-a", "site-b"]

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a site by its name. All are ended afterwards."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with ExitStack() as started:

        def begin(name: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", SITE, name, str(tmp_path / "run"), str(tmp_path / name)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield begin


def after_rounds(process: subprocess.Popen[str], rounds: int) -> int:
    """Read until a process has landed so many rounds of both since it has begun; the number of the last one.

    Rounds that it finds sealed when it begins are none of them.
    """
    assert process.stdout is not None
    landed = [int(line) for line in islice(process.stdout, rounds)]
    assert len(landed) == rounds, "it has ended"
    return landed[-1]


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_kills_cost_no_sealed_round_and_a_job_goes_on_from_the_folder(tmp_path: Path, start: Start) -> None:
    a, b = map(start, BOTH)
    after_rounds(b, 2)
    for _ in range(2):
        b.send_signal(signal.SIGKILL)
        b.wait()
        b = start("site-b")
        after_rounds(b, 2)
    for each in (a, b):  # the whole job
        each.send_signal(signal.SIGKILL)
        each.wait()
    store = Bucket(str(tmp_path / "run"))
    before = [each.weights for each in sealed(store)]
    a, b = map(start, BOTH)
    assert [after_rounds(each, 2) >= len(before) + 2 for each in (a, b)] == [True, True]
    (tmp_path / "run.stop").touch()
    assert [each.communicate(timeout=600)[0].splitlines()[-1] for each in (a, b)] == ["end", "end"]
    assert [each.weights for each in sealed(store)][: len(before)] == before
    assert [each.name for each in living(store)] == BOTH
