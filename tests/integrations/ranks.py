"""An example on real ranks, started as torchrun starts them, killed in a step if asked, and what was seen."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire

ROOT = Path(__file__).parents[2]
WORLD = 2
KILLED = -signal.SIGKILL
GUARD_S = 100.0

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.integrations.prepared", "tests.integrations.ranks"])


@dataclass
class Steps:
    """Notes each of this process's optimizer steps in a file of its rank; in step `die_at` it is killed.

    A line says how many steps gradwire had carried by then, those before a checkpoint included, and has a
    digest of the parameters.
    """

    folder: Path
    die_at: int | None
    count: int = 0
    wire: gradwire.Wire | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.wire is None:
            (self.wire,) = (each for each in gc.get_objects() if isinstance(each, gradwire.Wire))
        found = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.update(parameter.detach().numpy().tobytes())
        rank = dist.get_rank() if dist.is_initialized() else 0
        with (self.folder / f"{rank}.steps").open("a") as file:
            file.write(f"{self.wire.report().step} {found.hexdigest()}\n")
        self.count += 1
        if self.count == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Seen:
    """What all ranks of a run have seen, and what they printed."""

    codes: list[int | None]
    carried: list[list[int]]
    parameters: list[str]
    printed: str


Changes = Sequence[tuple[str, str]]
"""What stands in an example, once, and what stands there instead."""


def run(
    example: str,
    checkpoints: Path,
    folder: Path,
    die_at: int | None = None,
    changes: Changes = (),
    world: int = WORLD,
) -> Seen:
    """Run `examples/EXAMPLE CHECKPOINTS`, with `changes`."""
    folder.mkdir()
    source = (ROOT / "examples" / example).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) == 1, f"{example} has {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    script = folder / example
    script.write_text(source, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        _FORKED.Process(
            target=_main, args=(rank, world, port, script, checkpoints, folder, die_at), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(GUARD_S)
        process.kill()
        process.join()
    return seen([process.exitcode for process in ranks], folder)


def seen(codes: list[int | None], folder: Path) -> Seen:
    lines = [path.read_text().split() for path in sorted(folder.glob("*.steps"))]
    printed = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.out")))
    carried = [[int(step) for step in each[::2]] for each in lines]
    return Seen(codes, carried, [each[-1] for each in lines], printed)


def _main(
    rank: int, world: int, port: int, script: Path, checkpoints: Path, folder: Path, die_at: int | None
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests")
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    register_optimizer_step_post_hook(Steps(folder, die_at))
    sys.argv = [script.name, str(checkpoints)]
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # without the frameworks' own good-byes, which wait for each other
