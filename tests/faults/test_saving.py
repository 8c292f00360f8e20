"""Real ranks that are killed while they save, again and again: the newest whole set is always there."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support.ranks import started

pytestmark = pytest.mark.process

KILLS = 50 if os.environ.get("GRADWIRE_LAWS") == "full" else 5


def _kill_while_it_saves(folder: Path, place: Path, draw: random.Random) -> None:
    """SIGKILL to one rank of two, or both at once, at a moment of a save."""
    place.mkdir()
    with started("tests.faults.scenes_saving", 2, place, ["save"], timeout_s=60.0) as ranks:
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
    starts = [[line.split() for line in log if line.startswith("loaded")] for log in logs]
    assert len(starts[0]) == len(starts[1]) == KILLS + 1
    assert [step for _, step, _ in starts[0]] == [step for _, step, _ in starts[1]], "no mixture of sets"
    for log in logs:
        known, confirmed = set(), 0
        for line in log:
            what, step, digest = line.split()
            if what == "saving":
                known.add((step, digest))
            elif what == "saved":
                confirmed = int(step)
            elif int(step) > 0:
                assert (step, digest) in known, "torn, or of another run"
                assert int(step) >= confirmed, "what save() has confirmed is not lost"
    assert int(starts[0][-1][1]) > KILLS, "runs have gone on from each other"
