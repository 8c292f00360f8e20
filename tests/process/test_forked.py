"""Ranks that are forked: they end as told, and with their launcher."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from gradwire_lab.emulate.fork import Forked, fork

pytestmark = [pytest.mark.process, pytest.mark.rest]

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import os, sys, time
from gradwire_lab.emulate.fork import fork
if __name__ == "__main__":
    fork("tests.process.scenes_forked:linger", [1], variables=os.environ, cores=set(), netns=None, output=2)
    time.sleep(60)
"""


@contextmanager
def forked(scene: str) -> Iterator[tuple[Forked, int, IO[bytes]]]:
    """The rank, what it writes, and what it prints."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as output:
        rank = fork(
            f"tests.process.scenes_forked:{scene}",
            [write],
            variables={**os.environ, "RANK": "5"},
            cores=set(),
            netns=None,
            output=output.fileno(),
        )
        os.close(write)
        yield rank, read, output
    os.close(read)


def test_a_rank_has_an_environment_a_session_and_an_output_of_its_own() -> None:
    with forked("look_around") as (rank, said, output):
        assert rank.wait(30.0) == 3
        assert os.read(said, 100) == b"5 True"
        output.seek(0)
        assert output.read() == b"printed\n"
        assert rank.poll() == 3


def test_a_rank_can_be_killed_and_leaves_no_descriptor() -> None:
    with forked("linger") as (rank, said, _output):  # the process that it is forked from holds some, too
        os.read(said, 100)
        rank.kill()
        rank.wait(10.0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with forked("linger") as (rank, said, _output):
        assert int(os.read(said, 100)) == rank.pid
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.1)
        assert rank.poll() is None
        rank.kill()
        assert rank.wait(10.0) == -signal.SIGKILL
        rank.kill()  # once more does nothing
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For the socket of a launcher that is killed, whose name may not be as long as those of `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_rank_ends_with_its_launcher(short_folder: Path) -> None:
    script = short_folder / "launcher.py"
    script.write_text(LAUNCHER)
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "TMPDIR": str(short_folder)}
    environment = {**os.environ, **paths}
    launcher = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout as said:
        pid = int(os.read(said.fileno(), 100))
        launcher.kill()
        launcher.wait()
        deadline_s = time.monotonic() + 5.0
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline_s, "it outlives its launcher"
            time.sleep(0.02)
