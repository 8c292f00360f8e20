"""Ranks as real processes over gloo: each runs the scenes of a module and writes what came of them.

A scene is a function without arguments; all ranks run it at the same time, with the default process
group in place. What it returns must fit into JSON.
"""

from __future__ import annotations

import importlib
import json
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

Results = list[dict[str, Any]]


def perform(module: str, world: int, folder: Path, scenes: Sequence[str] = ()) -> Results:
    """Run the scenes of `module` (all, or those named) on `world` ranks; what each returned, by rank."""
    with started(module, world, folder, scenes) as ranks:
        deadline_s = time.monotonic() + GUARD_S
        for process in ranks:
            process.wait(max(0.1, deadline_s - time.monotonic()))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@contextmanager
def started(
    module: str, world: int, folder: Path, scenes: Sequence[str] = (), timeout_s: float = 40.0
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks while they run, printing to `RANK.out`; whoever is left at the end is killed."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # an aborted rank says where it was
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
    }
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


def _main(module: str, rank: str, world: str, folder: str, timeout_s: str, *scenes: str) -> None:
    torch.set_num_threads(1)
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
