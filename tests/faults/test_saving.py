"""Real ranks that are killed while they save, again and again: the newest whole set is always there."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.bits import checksums
from tests.support.models import optimizer_of, perceptron, train
from tests.support.ranks import started
from tests.support.states import own_state

pytestmark = pytest.mark.process

KILLS = 50 if os.environ.get("GRADWIRE_LAWS") == "full" else 5


def save_until_killed(folder: Path) -> None:
    """Go on from the folder, and note what is loaded, what is about to be saved, and what has been."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    with (folder / f"log-{dist.get_rank()}").open("a") as log:

        def note(what: str) -> None:
            state = own_state(wire)
            memory = [each for _, each in sorted(state["memory"].items())]
            print(what, state["step"], *checksums(memory), file=log, flush=True)

        wire.load(folder / "saved")
        note("loaded")
        for step in range(1_000_000):
            train(ddp, optimizer, range(step, step + 1))
            note("saving")
            wire.save(folder / "saved")
            note("saved")
            print("saved", flush=True)


def _kill_while_it_saves(folder: Path, place: Path, draw: random.Random) -> None:
    """SIGKILL to one rank of two, or both at once, at a moment of a save."""
    place.mkdir()
    with started(partial(save_until_killed, folder), 2, place, timeout_s=60.0) as ranks:
        deadline_s, enough = time.monotonic() + 60, draw.randint(2, 4)
        while len((place / "0.out").read_text().splitlines()) < enough:
            assert time.monotonic() < deadline_s, "nothing was ever saved"
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.05))  # one step with its save takes a few hundredths of a second
        for rank in draw.choice([(0,), (1,), (0, 1)]):
            ranks[rank].process.kill()
        time.sleep(0.02)  # what the other does on its own


@pytest.mark.timeout(30 * KILLS)
def test_whatever_a_kill_interrupts_all_ranks_go_on_from_one_whole_set(
    tmp_path: Path,
) -> None:
    draw = random.Random(28)
    for number in range(KILLS + 1):
        _kill_while_it_saves(tmp_path, tmp_path / str(number), draw)
    logs = [(tmp_path / f"log-{rank}").read_text().splitlines() for rank in (0, 1)]
    starts = [[int(line.split()[1]) for line in log if line.startswith("loaded")] for log in logs]
    assert len(starts[0]) == len(starts[1]) == KILLS + 1
    assert starts[0] == starts[1], "no mixture of sets"
    for log in logs:
        known, confirmed = set(), 0
        for line in log:
            what, step, *memory = line.split()
            if what == "saving":
                known.add((step, *memory))
            elif what == "saved":
                confirmed = int(step)
            elif int(step) > 0:
                assert (step, *memory) in known, "torn, or of another run"
                assert int(step) >= confirmed, "what save() has confirmed is not lost"
    assert starts[0][-1] > KILLS, "runs have gone on from each other"
