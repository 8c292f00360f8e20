"""`gradwire advise` on real ranks: it says what is so, and the script does what it does without it."""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import tests.support.ranks  # says what ranks import before they are forked  # noqa: F401
from gradwire.advise.traces import read
from gradwire.cli.main import app
from tests.process.advised_script import TRACED

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("advised_script.py")
GUARD_S = 60.0


class Ended(NamedTuple):
    """How ranks have ended: exit codes, what they printed, and hashes of their parameters."""

    codes: list[int | None]
    printed: list[str]
    hashes: list[str]


def start(folder: Path, world: int, *modes: str, advised: tuple[str, ...] | None = ()) -> Ended:
    """The script on ranks, as torchrun starts them: `advised` with these options, or on its own."""
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    forked = multiprocessing.get_context("forkserver")
    ranks = [
        forked.Process(target=_main, args=(rank, world, port, folder, modes, advised))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(GUARD_S)
        process.kill()
        process.join()
    return Ended(
        [process.exitcode for process in ranks],
        [(folder / f"{rank}.out").read_text() for rank in range(world)],
        [path.read_text() if (path := folder / f"{rank}.sha").exists() else "" for rank in range(world)],
    )


def _main(
    rank: int, world: int, port: int, folder: Path, modes: tuple[str, ...], advised: tuple[str, ...] | None
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), COLUMNS="1000", XDG_CACHE_HOME=str(folder / "cache"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.dump_traceback_later(GUARD_S - 5.0)  # a rank that hangs says where
    words = [str(SCRIPT), str(folder), *modes]
    code: object = 0
    try:
        if advised is None:
            sys.argv = words
            runpy.run_path(str(SCRIPT), run_name="__main__")
        else:
            app(["advise", "--steps", "8", *advised, *words], prog_name="gradwire")
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(str(code or 0)))  # as all ranks of tests: of a fork, the interpreter's own end may hang


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.rest) for world in (2, 4))])
def test_a_run_is_bit_for_bit_the_one_that_is_not_watched(tmp_path: Path, world: int) -> None:
    plain = start(tmp_path / "plain", world, advised=None)
    watched = start(tmp_path / "watched", world)
    assert plain.codes == [0] * world, plain.printed
    assert watched.codes == [0] * world, watched.printed
    assert all(watched.hashes)
    assert watched.hashes == plain.hashes
    assert watched.printed[0].startswith("step ")
    assert watched.printed[0].count("\nstep ") == 0, "said once, though the script goes on"
    assert not any(watched.printed[1:]), "the first rank speaks for all"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        # 111,907 numbers, of two bytes each
        ("hooked", ("224 kB in 1 call", "cannot tell: a comm hook is registered (fp16_compress_hook)")),
        ("attached", ("bound by       unknown: gradwire is attached", "cannot tell: gradwire is attached")),
        # sites of one rank each, with DDP inside
        ("carried", ("computing and waiting for 448 kB in 1 call", "there is one rank")),
    ],
)
def test_scripts_that_register_hooks_run_as_they_do(tmp_path: Path, mode: str, said: tuple[str, ...]) -> None:
    plain = start(tmp_path / "plain", 2, mode, advised=None)
    watched = start(tmp_path / "watched", 2, mode)
    assert watched.codes == [0, 0], watched.printed
    assert watched.hashes == plain.hashes
    for words in said:
        assert words in watched.printed[0]


def test_passes_that_send_nothing_are_no_work_between_steps(tmp_path: Path) -> None:
    path = tmp_path / "advice.json"
    ended = start(tmp_path, 2, "accumulates", advised=("--json", str(path)))
    assert ended.codes == [0, 0], ended.printed
    found = json.loads(path.read_text())
    assert found["step_s"] >= 0.1
    assert found["between_s"] < 0.25 * found["step_s"]
    assert found["bound"] not in ("between", "input")


def test_a_slow_input_pipeline_is_named_first_and_a_script_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "advice.json"
    ended = start(tmp_path, 2, "slow_input", "4", advised=("--stop", "--json", str(path)))
    assert ended.codes == [0, 0], ended.printed
    found = json.loads(path.read_text())
    assert found["bound"] == "input"
    assert found["input_s"] >= 0.04
    assert found["calls"] == 1
    assert not any(ended.hashes), "it has not come to its end"
    # Ten steps to warm up, eight that count, and one in which DDP logs the last of them.
    step, _, words = (tmp_path / "0.ended").read_text().partition(" ")
    assert int(step) in (18, 19, 20)
    assert words == str([str(tmp_path), "slow_input", "4"])


@pytest.mark.rest
def test_a_slow_rank_is_named_first(tmp_path: Path) -> None:
    path = tmp_path / "advice.json"
    ended = start(tmp_path, 2, "slow_rank", advised=("--json", str(path)))
    found = json.loads(path.read_text())
    assert found["bound"] == "late rank"
    assert "rank 1 is" in ended.printed[0]
    assert found["late_s"] == pytest.approx(0.04, abs=0.02)


@pytest.mark.rest
def test_workers_of_a_loader_may_be_spawned(tmp_path: Path) -> None:
    plain = start(tmp_path / "plain", 2, "workers", advised=None)
    watched = start(tmp_path / "watched", 2, "workers")
    assert watched.codes == [0, 0], watched.printed
    assert watched.hashes == plain.hashes
    assert watched.printed[0].startswith("step ")
    assert watched.printed[0].count("\nstep ") == 0, "said once, though the script goes on"


def test_a_script_that_raises_ends_with_its_own_traceback(tmp_path: Path) -> None:
    ended = start(tmp_path, 2, "raises")
    assert ended.codes == [1, 1]
    assert "ArithmeticError: the loss is no number" in ended.printed[0]
    assert "advised_script.py" in ended.printed[0]
    assert "gradwire/advise" not in ended.printed[0]
    assert "gradwire advise: the script ended when 1 step had been watched" in ended.printed[0]


@pytest.mark.rest
def test_a_script_that_ends_early_or_has_no_ddp_is_told_so(tmp_path: Path) -> None:
    early = start(tmp_path / "early", 2, "early")
    assert early.codes == [0, 0]
    assert "1 step had been watched: 5 are needed" in early.printed[0]
    assert "0 steps" not in early.printed[1]
    alone = start(tmp_path / "alone", 1, "alone")
    assert alone.codes == [0]
    assert "no DistributedDataParallel was made in this process" in alone.printed[0]
    assert "torchrun" not in alone.printed[0], "by which it was started"


def test_a_trace_of_torch_says_all_that_is_needed(tmp_path: Path) -> None:
    assert start(tmp_path, 2, "traced", advised=None).codes == [0, 0]
    found = read([tmp_path / f"{rank}.json.gz" for rank in range(2)])
    assert (found.wrapper, found.backend, found.world, found.missing) == ("DDP", "gloo", 2, ())
    # The first step that was recorded began before its optimizer's step was.
    assert [len(each.steps) for each in found.ranks] == [TRACED - 1] * 2
    shapes = ((7,), (7, 300), (300,), (300, 300), (300,), (300, 64))
    assert found.gradients is not None
    assert sorted(found.gradients.shapes) == sorted(shapes)
    assert list(found.gradients.ready_s) == sorted(found.gradients.ready_s)
    assert found.buckets == (4.0 * sum(map(math.prod, shapes)),)
    step = found.ranks[0].steps[0]
    assert 0.0 <= step.exposed_s <= step.communicating_s < step.step_s
    assert step.communicating_s > 0.0
    assert 0.0 < step.input_s < step.step_s
