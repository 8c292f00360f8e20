"""Ranks as real processes over gloo: each runs the scenes of a module and writes what came of them.

A scene is a function without arguments; all ranks run it at the same time, with the default process
group in place. What it returns must fit into JSON. Where nobody sends signals to them, ranks are forked from
a process that has imported everything: an import takes longer than most scenes.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
GUARD_S = 230.0
"""When a world hangs, it is ended after so long."""

TIMEOUT_S = 40.0
"""Of the process group."""

Results = list[dict[str, Any]]

_VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.process.prepared", "tests.process.ranks"])


def perform(module: str, world: int, folder: Path, scenes: Sequence[str] = ()) -> Results:
    """Run the scenes of `module` (all, or those named) on `world` ranks; what each returned, by rank."""
    settings = [
        (module, str(rank), str(world), str(folder), str(TIMEOUT_S), *scenes) for rank in range(world)
    ]
    ranks = [_FORKED.Process(target=_forked, args=each, daemon=True) for each in settings]
    deadline_s = time.monotonic() + GUARD_S
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.1, deadline_s - time.monotonic()))
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@contextmanager
def started(
    module: str, world: int, folder: Path, scenes: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks while they run, printing to `RANK.out`; whoever is left at the end is killed."""
    environment = {**os.environ, **_VARIABLES, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    ranks = []
    try:
        for rank in range(world):
            arguments = [module, str(rank), str(world), str(folder), str(timeout_s), *scenes]
            command = [sys.executable, "-m", "tests.process.ranks", *arguments]
            with (folder / f"{rank}.out").open("wb") as out:
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def value(results: Results, scene: str) -> list[Any]:
    """What `scene` returned, by rank; fails with the traceback of the rank that raised."""
    for rank, result in enumerate(results):
        assert scene in result, f"rank {rank} broke off in {list(result)[-1]!r}: {list(result.values())[-1]}"
        assert "error" not in result[scene], f"rank {rank}:\n{result[scene]['error']}"
    return [result[scene]["value"] for result in results]


def _run(scene: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": scene()}
    except Exception:
        return {"error": traceback.format_exc()}


def _forked(module: str, rank: str, world: str, folder: str, timeout_s: str, *scenes: str) -> None:
    os.environ.update(_VARIABLES)
    with Path(folder, f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
    _main(module, rank, world, folder, timeout_s, *scenes)


def _main(module: str, rank: str, world: str, folder: str, timeout_s: str, *scenes: str) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # an aborted rank says where it was
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=float(timeout_s)),
    )
    known: Mapping[str, Callable[[], Any]] = importlib.import_module(module).SCENES
    results = {}
    for name in scenes or known:
        results[name] = _run(known[name])
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if "error" in results[name]:
            break  # the ranks may be out of step now
    # Peers may have failed: an orderly end would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
