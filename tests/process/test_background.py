"""Kernels that are compiled by a process beside training."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.kernels import background, compiler
from tests.support.command import eventually
from tests.support.lacking import NEVER, lacks_kernels
from tests.support.local_steps import common_folder
from tests.support.models import digest, optimizer_of, perceptron, train
from tests.support.tiers import rest
from tests.support.world import Ranks

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
from pathlib import Path
from gradwire.kernels.background import BackgroundCompilation
from gradwire.kernels.cpu.cache import writable

compiling = BackgroundCompilation({"draws", "topk", "blocks"}, writable(), time.monotonic)
print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
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
def test_another_process_compiles_into_the_cache_and_takes_no_module_here_for_pythons_own(
    tmp_path: Path,
) -> None:
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


def test_ranks_of_a_machine_are_out_of_patience_together_once_no_kernel_of_any_run_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that compiled for another run first was taken for one that had been stopped. And the lock is
    free once the first rank has stopped its process: the next one waited as long again.
    """
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


RECIPE = "topk(ratio=0.05)"
Attached = tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.Wire]


def _attached(recipe: str, steps: int) -> Attached:
    """A model for which rank 1 has its kernels after so many steps."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    with lacks_kernels(1, steps):
        return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe)


@dataclass(frozen=True)
class Trained:
    """Eight steps: which were dense, digests of the parameters, and what the wire told before and after."""

    is_dense: list[bool]
    after_four: str
    after_four_of_ddp: str
    end: str
    report: str
    is_settled: bool
    recipe_at_end: str
    is_settled_at_end: bool


def trained() -> Trained:
    """Rank 1 has its kernels in the fourth step."""
    ddp, optimizer, wire = _attached(RECIPE, 3)
    plain = DistributedDataParallel(perceptron())
    train(plain, optimizer_of(plain), range(4))
    is_dense, digests = list[bool](), list[str]()
    report, is_settled = str(wire.report()), wire.settled
    for step in range(8):
        train(ddp, optimizer, range(step, step + 1))
        is_dense.append(wire.report().ratio > 0.9)
        digests.append(digest(ddp))
    told = report, is_settled, wire.report().recipe, wire.settled
    return Trained(is_dense, digests[3], digest(plain), digests[7], *told)


def test_gradients_travel_dense_until_all_ranks_have_their_kernels(three: Ranks) -> None:
    for found in three(trained):
        assert found.is_dense == [True] * 4 + [False] * 4
        assert found.after_four == found.after_four_of_ddp
        assert "dense until its kernels are compiled" in found.report
        assert (found.is_settled, found.is_settled_at_end) == (False, True)
        assert found.recipe_at_end.startswith("topk(ratio=0.05")
    assert len({found.end for found in three(trained)}) == 1


@dataclass(frozen=True)
class Resumed:
    """Digests at the end of a run, and of one that has loaded its state."""

    through: str
    resumed: str


def resumed(saved_after: int) -> Resumed:
    """Ten steps, of which four are dense, beside a run that loads a state while it awaits kernels itself."""
    ddp, optimizer, wire = _attached(RECIPE, 3)
    train(ddp, optimizer, range(saved_after))
    again, optimizer_again, wire_again = _attached(RECIPE, NEVER)
    again.load_state_dict(ddp.state_dict())
    state = wire.state_dict()
    wire_again.load_state_dict(state)
    train(again, optimizer_again, range(saved_after, 10))
    if saved_after < 4:  # what was loaded runs at once, and so it does here
        wire.load_state_dict(state)
    train(ddp, optimizer, range(saved_after, 10))
    return Resumed(digest(ddp), digest(again))


@pytest.mark.parametrize("saved_after", [2, 7])
def test_a_state_goes_on_in_a_run_that_still_awaits_kernels(three: Ranks, saved_after: int) -> None:
    """Saved before its own run has its kernels, and after."""
    for found in three(resumed, saved_after):
        assert found.resumed == found.through


def recipe_while_kernels_lack(change: str) -> str:
    """Another recipe, or none."""
    ddp, optimizer, wire = _attached(RECIPE, NEVER)
    train(ddp, optimizer, range(2))
    if change:
        wire.switch(change)
    else:
        wire.detach()
    train(ddp, optimizer, range(2, 4))
    return wire.report().recipe


def test_what_is_switched_to_meanwhile_runs_at_once(three: Ranks) -> None:
    assert all(recipe.startswith("int8") for recipe in three(recipe_while_kernels_lack, "int8"))
    assert three(recipe_while_kernels_lack, "") == ["dense"] * 3


def has_settled_at_once(recipe: str) -> bool:
    """Although rank 1 lacks kernels."""
    return _attached(recipe, NEVER)[2].settled


def test_what_does_more_than_compress_is_not_replaced_by_dense_gradients(three: Ranks) -> None:
    """`dgc` has the momentum in place of the optimizer."""
    assert three(has_settled_at_once, "dgc(ratio=0.1, momentum=0.9, warmup_steps=0)") == [True] * 3
    assert three(has_settled_at_once, RECIPE) == [False] * 3


@dataclass(frozen=True)
class Asked:
    """Two rounds: how often the compilation was asked whether it has ended, and a digest at the end."""

    in_the_first_local_step: int
    in_the_first_round: int
    in_all: int
    digest: str


def rounds(over: str, lacks: int) -> Asked:
    """Local steps over a group or a store, where rank 1 has its kernels after so many questions."""
    who: dict[str, Any] = {"replicas": dist.group.WORLD}
    if over == "store":
        name, count = f"site-{dist.get_rank()}", dist.get_world_size()
        who = {"members": gradwire.members.store(common_folder(), name, at_least=count, beat_s=2.0)}
    model = perceptron()
    optimizer, questions = optimizer_of(model), list[int]()
    with lacks_kernels(1, lacks) as compiling:
        wire = gradwire.outer(model, optimizer, RECIPE, every=2, **who)
    for steps in (range(1), range(1, 2), range(2, 4)):
        train(model, optimizer, steps)
        questions.append(compiling.questions)
    found = Asked(*questions, digest(model))
    wire.detach()
    return found


@pytest.mark.parametrize("over", rest(["group", "store"], but=["group"]))
def test_the_first_round_waits_for_kernels_and_local_steps_do_not(three: Ranks, over: str) -> None:
    """They were compiled in `outer`, before the first local step, and all replicas waited for the slowest."""
    found, at_once = three(rounds, over, 3), three(rounds, over, 0)
    assert [each.in_the_first_local_step for each in found] == [0, 0, 0]
    assert [each.in_the_first_round for each in found] == [0, 4, 0], "rank 1 lacks them for three questions"
    assert [each.in_all for each in found] == [0, 4, 0]
    assert len({each.digest for each in found + at_once}) == 1


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
