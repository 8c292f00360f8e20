"""Kernels that are compiled by a process beside training."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradwire.kernels import background, compiler
from tests.support.command import eventually
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process

COMPILES = """
import json, os, time
from gradwire.kernels import compiler
from gradwire.kernels.background import BackgroundCompilation
from gradwire.kernels.cpu.cache import writable

asked = {"draws", "noise"}
lacked = compiler.lacking(asked)
both = [BackgroundCompilation(asked, writable(), time.monotonic) for _ in range(2)]
while not all([each.has_ended() for each in both]):
    time.sleep(0.05)
lacks = compiler.lacking(asked)
compiler.prepare(asked)
print(json.dumps([sorted(lacked), sorted(lacks), compiler.compiled_s()]))
"""

FAILS = """
import json, sys, time
from gradwire.kernels import compiler
from gradwire.kernels.background import BackgroundCompilation
from gradwire.kernels.cpu.cache import writable

sys.executable = sys.argv[1]
both = [BackgroundCompilation({"draws"}, writable(), time.monotonic) for _ in range(2)]
while not all([each.has_ended() for each in both]):
    time.sleep(0.05)
assert all([each.has_ended() for each in both for _ in range(3)])
print(json.dumps(sorted(compiler.lacking({"draws"}))))
"""

KILLED = """
import os, signal, time
from gradwire.kernels.background import BackgroundCompilation
from gradwire.kernels.cpu.cache import writable

compiling = BackgroundCompilation({"draws", "topk", "blocks"}, writable(), time.monotonic)
print(compiling._processes[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _said(script: str, cache: Path, *arguments: str) -> Any:
    """What the script prints, in a process that finds its kernels in `cache`."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_another_process_compiles_into_the_cache(tmp_path: Path) -> None:
    assert _said(COMPILES, tmp_path) == [["draws"], [], 0.0]


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", ["/bin/false", "/no/such/file"])
def test_a_process_that_cannot_compile_is_not_waited_for(python: str, tmp_path: Path) -> None:
    assert _said(FAILS, tmp_path, python) == ["draws"]


@pytest.mark.rest
def test_the_process_does_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, check=False
    )
    told = Path(f"/proc/{int(done.stdout)}/cmdline")
    assert eventually(lambda: not (told.exists() and told.read_bytes()), 60.0)


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_modules_of_the_working_directory_are_not_taken_for_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(COMPILES)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["draws"], [], 0.0]


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_process_that_was_stopped_is_not_waited_for_without_a_limit(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps the lock. Gradients stayed dense as long, and `outer` had a limit of its own."""
    stopped = tmp_path / "stopped"
    stopped.write_text("#!/bin/sh\nkill -STOP $$\n")
    stopped.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stopped))
    monkeypatch.setattr(compiler, "lacking", frozenset)
    with (tmp_path / "compiling").open("w") as lock:
        if whose == "another's":
            fcntl.flock(lock, fcntl.LOCK_EX)
        passed_s = [0.0]
        compiling = background.BackgroundCompilation({"topk"}, tmp_path, lambda: passed_s[0])
        passed_s[0] = 0.99 * background.PATIENCE_S
        assert not compiling.has_ended()
        passed_s[0] = background.PATIENCE_S
        assert compiling.has_ended()
    assert "may have been stopped" in caplog.text
    with (tmp_path / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nor does a process of its own keep it


def test_a_process_that_ends_during_a_look_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended after the look at the cache: "exit code 0", said a warning, and kernels were compiled anew."""
    ends = tmp_path / "ends"
    ends.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid\nwhile ! test -e {tmp_path}/go; do sleep 0.01; done\n"
    )
    ends.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ends))
    monkeypatch.setattr(compiler, "lacking", frozenset)
    compiling = background.BackgroundCompilation({"topk"}, tmp_path, lambda: 0.0)

    def lacking(subjects: frozenset[str]) -> frozenset[str]:
        while not (pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else "").endswith(
            "\n"
        ):
            time.sleep(0.01)
        (tmp_path / "go").touch()
        os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(compiler, "lacking", lambda _subjects: frozenset())
        return subjects

    monkeypatch.setattr(compiler, "lacking", lacking)
    assert not compiling.has_ended()
    assert compiling.has_ended()
    assert not caplog.text


def test_ranks_of_a_machine_are_out_of_patience_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free once the first has stopped its process. The next one waited as long again."""
    monkeypatch.setattr(compiler, "lacking", frozenset)
    passed_s = [0.0]
    with (tmp_path / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiling = background.BackgroundCompilation({"topk"}, tmp_path, lambda: passed_s[0])
    passed_s[0] = background.PATIENCE_S
    assert compiling.has_ended()


def test_a_process_that_compiles_for_another_run_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one that had been stopped, and a step compiled, for which all ranks waited."""
    monkeypatch.setattr(compiler, "lacking", frozenset)
    passed_s = [0.0]
    with (tmp_path / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(tmp_path, (1.0, 1.0))
        compiling = background.BackgroundCompilation({"topk"}, tmp_path, lambda: passed_s[0])
        passed_s[0] = 0.9 * background.PATIENCE_S
        (tmp_path / "a kernel of another run").touch()
        assert not compiling.has_ended()
        passed_s[0] = 1.8 * background.PATIENCE_S
        assert not compiling.has_ended()
        passed_s[0] = 1.9 * background.PATIENCE_S
        assert compiling.has_ended()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on three ranks."""
    return Scenes("tests.process.scenes_background", 3, tmp_path_factory.mktemp("background"))


def test_gradients_travel_dense_until_all_ranks_have_their_kernels(world: Scenes) -> None:
    for found in value(world, "trains"):
        assert found["dense"] == [True] * 4 + [False] * 4, "rank 1 has its kernels in the fourth step"
        assert found["first"] == found["plain"], "bit for bit"
        assert "dense until its kernels are compiled" in found["report"]
        assert found["settled"] == [False, True]
        assert found["recipe"].startswith("topk(ratio=0.05")
    assert len({found["digest"] for found in value(world, "trains")}) == 1


@pytest.mark.parametrize("how", ["a state of before", "a state of after"])
def test_a_state_goes_on_in_a_run_that_still_awaits_kernels(world: Scenes, how: str) -> None:
    found = value(world, how)
    assert {each["resumed"] for each in found} == {each["through"] for each in found}


def test_what_is_switched_to_meanwhile_runs_at_once(world: Scenes) -> None:
    for found in value(world, "switches"):
        assert found["recipe"].startswith("int8")
        assert found["detached"] == "dense"


def test_what_does_more_than_compress_is_not_replaced_by_dense_gradients(world: Scenes) -> None:
    assert value(world, "momentum") == [True] * 3


@pytest.mark.parametrize("which", rest(["rounds", "rounds over a store"], but=["rounds"]))
def test_the_first_round_waits_for_kernels_and_local_steps_do_not(world: Scenes, which: str) -> None:
    """They were compiled in `outer`, before the first local step, and all replicas waited for the slowest."""
    found = value(world, which)
    asked = [[each[when] for when in ("asked before", "asked", "asked again")] for each in found]
    assert asked == [[0, 0, 0], [0, 4, 4], [0, 0, 0]], "rank 1 lacks them for three questions"
    assert len({each[which] for each in found for which in ("digest 0", "digest 3")}) == 1


ROUNDS = """
import json, os, sys
rank = int(os.fork() == 0)
import torch, torch.distributed as dist
import gradwire
from gradwire.kernels import compiler

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
model = torch.nn.Linear(256, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wire = gradwire.outer(model, optimizer, "int8", every=3, replicas=dist.group.WORLD)
lacked = bool(compiler.lacking(compiler.imported()))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
told = [lacked, wire.report().step, compiler.compiled_s()]
dist.barrier()
if rank == 0:
    assert os.wait()[1] == 0
    print(json.dumps(told))
"""


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_outer_returns_before_its_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADWIRE_COMPILE_FIRST")
    assert _said(ROUNDS, tmp_path / "cache", str(tmp_path / "meeting")) == [True, 1, 0.0]
