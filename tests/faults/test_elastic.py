"""torchrun starts workers again after a kill: they go on from the newest save, on as many ranks or others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.test_examples import torchrun
from tests.support.command import eventually
from tests.support.ranks import ROOT

pytestmark = pytest.mark.process

UNTIL, KILLED_AT, GUARD_S = 200, 50, 90.0
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun keeps one store for all starts, in which gloo finds where dead workers listened."""
SAID = re.compile(r"(\d) ranks, steps (\d+) to (\d+): loss ([\d.]+)")


def _children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for each in threads for child in (each / "children").read_text().split()]


def _said(text: str) -> tuple[int, int, int, str]:
    found = SAID.search(text)
    assert found is not None, text
    ranks, start, stop, loss = found.groups()
    return int(ranks), int(start), int(stop), loss


def _killed_in_the_middle(folder: Path) -> str:
    """What torchrun prints, one of whose workers is killed by `kill -9` once it has saved a few times."""
    command = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "examples/elastic.py"]
    with (folder.parent / "said").open("wb") as said:
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command, str(folder), "--until", str(UNTIL)],
            cwd=ROOT,
            env={**os.environ, **OWN_STORE, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")},
            stdout=said,
            stderr=said,
        )
        try:
            saved = folder / f"model-{KILLED_AT}.pt"
            assert eventually(saved.exists, GUARD_S), Path(said.name).read_text()
            os.kill(_children(agent.pid)[1], signal.SIGKILL)
            agent.wait(GUARD_S)
        finally:
            for pid in _children(agent.pid) if agent.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            agent.kill()
            agent.wait()
    return Path(said.name).read_text()


def test_the_example_goes_on_where_it_was_on_as_many_ranks_and_on_more(tmp_path: Path) -> None:
    folder, straight = tmp_path / "broken", tmp_path / "straight"

    def run(world: int, where: Path, until: int) -> tuple[int, int, int, str]:
        return _said(torchrun(world, "elastic.py", str(where), "--until", str(until), folder=tmp_path))

    assert run(2, folder, 20)[:3] == (2, 0, 20)
    *_, loss = run(2, straight, 30)
    assert run(2, folder, 30) == (2, 20, 30, loss)
    assert run(3, folder, 40)[:3] == (3, 30, 40)


@pytest.mark.skipif(os.environ.get("GRADWIRE_LAWS") != "full", reason="starts interpreters: make test-full")
@pytest.mark.timeout(4 * GUARD_S)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    ranks, start, stop, loss = _said(_killed_in_the_middle(folder))
    assert (ranks, stop) == (2, UNTIL)
    # The model's file is there before the wire's, so the newest whole save may be the one before it.
    assert KILLED_AT - 10 <= start < UNTIL, "without a hand on it"
    whole = torchrun(2, "elastic.py", str(straight), "--until", str(UNTIL), folder=tmp_path)
    assert _said(whole) == (2, 0, UNTIL, loss)
