"""An example on real ranks, started as torchrun starts them, killed in a step if asked, and what was seen."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import runpy
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire

ROOT = Path(__file__).parents[2]
WORLD = 2
KILLED = 9
GUARD_S = 100.0

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.integrations.prepared", "tests.integrations.ranks"])


@dataclass
class Steps:
    """What a rank saw at each of its optimizer's steps; in step `die_at` it dies."""

    die_at: int | None
    carried: list[int] = field(default_factory=list)
    """How many steps gradwire had carried by then, in this run and those that it went on from."""
    parameters: str = ""
    """A digest of the last."""
    wire: gradwire.Wire | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.wire is None:
            (self.wire,) = (each for each in gc.get_objects() if isinstance(each, gradwire.Wire))
        self.carried.append(self.wire.report().step)
        found = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.update(parameter.detach().numpy().tobytes())
        self.parameters = found.hexdigest()
        if len(self.carried) == self.die_at:
            os._exit(KILLED)


@dataclass(frozen=True)
class Seen:
    """What all ranks of a run have seen, and what they printed."""

    codes: list[int | None]
    carried: list[list[int]]
    parameters: list[str]
    printed: str


def run(example: str, checkpoints: Path, folder: Path, die_at: int | None = None) -> Seen:
    """Run `examples/EXAMPLE CHECKPOINTS` on two ranks."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        _FORKED.Process(target=_main, args=(rank, port, example, checkpoints, folder, die_at), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(GUARD_S)
        process.kill()
        process.join()
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    printed = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.out")))
    return Seen(
        [process.exitcode for process in ranks],
        [row["carried"] for row in rows],
        [row["parameters"] for row in rows],
        printed,
    )


def _main(rank: int, port: int, example: str, checkpoints: Path, folder: Path, die_at: int | None) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests")
    os.environ.update(WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    steps = Steps(die_at)
    register_optimizer_step_post_hook(steps)
    sys.argv = [example, str(checkpoints)]
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    seen = {"carried": steps.carried, "parameters": steps.parameters}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # without the frameworks' own good-byes, which wait for each other
