"""Ranks as real processes over gloo, which may be killed: each runs a scene and writes what came of it.

A scene is a function without arguments; all ranks run it at the same time, with the default process
group in place. Ranks are forked from a process that has imported everything: an import takes longer than
most scenes. Scenes of a module by name, for `tests/gpu`, return what fits into JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
GUARD_S = 230.0
"""When a world hangs, it is ended after so long."""

TIMEOUT_S = 40.0
"""Of the process group."""

FOLDER = "GRADWIRE_TEST_FOLDER"
"""Where a scene finds the folder of its world."""

BACKEND = "GRADWIRE_TEST_BACKEND"
"""Names the backend of the default process group, if it is not gloo. Ranks over NCCL share the first GPU."""

ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
"""NCCL refuses two ranks on one GPU of one host. Each with an id of its own is a host, over sockets."""

Results = list[dict[str, Any]]

VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.support.prepared", "tests.support.world"])


@dataclass(frozen=True)
class Rank:
    """A rank that runs."""

    process: BaseProcess

    def send_signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float) -> int:
        """The code with which it ends; raises `TimeoutError` when that takes longer."""
        self.process.join(max(0.1, timeout_s))
        if self.process.exitcode is None:
            raise TimeoutError(f"a rank still runs after {timeout_s:.1f} s")
        return self.process.exitcode


def perform(
    module: str, world: int, folder: Path, scenes: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> Results:
    """Run the scenes of `module` (all, or those named) on `world` ranks; what each returned, by rank."""
    with _forked(world, folder, partial(_main, module, scenes=scenes), timeout_s) as ranks:
        wait_for(ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@contextmanager
def started(
    scene: Callable[[], object], world: int, folder: Path, timeout_s: float = TIMEOUT_S
) -> Iterator[list[Rank]]:
    """Ranks that run the scene, printing to `RANK.out`; those left at the end are killed."""
    with _forked(world, folder, partial(_alone, scene), timeout_s) as ranks:
        yield ranks


def wait_for(ranks: Iterable[Rank], guard_s: float = GUARD_S) -> None:
    """Until all have ended, or too long: what a rank has not returned is missed later."""
    deadline_s = time.monotonic() + guard_s
    for rank in ranks:
        with suppress(TimeoutError):
            rank.wait(deadline_s - time.monotonic())


def returned(folder: Path, rank: int) -> Any:
    """What the scene of `started` returned there; fails with the traceback if it raised, or with the last of
    what it has printed if it has returned nothing.
    """
    file, said = folder / f"{rank}.pickle", (folder / f"{rank}.out").read_text(errors="replace")[-2000:]
    assert file.exists(), f"rank {rank} has returned nothing. It printed:\n{said}"
    found = pickle.loads(file.read_bytes())
    assert "error" not in found, f"rank {rank}:\n{found['error']}"
    return found["value"]


@contextmanager
def _forked(
    world: int, folder: Path, run: Callable[[int, int, Path, float], None], timeout_s: float
) -> Iterator[list[Rank]]:
    ranks = []
    try:
        for rank in range(world):
            Path(folder, f"{rank}.out").touch()
            process = FORKED.Process(target=run, args=(rank, world, folder, timeout_s), daemon=True)
            process.start()
            ranks.append(Rank(process))
        yield ranks
    finally:
        for each in ranks:
            each.process.kill()
        for each in ranks:
            each.process.join()


@contextmanager
def started_anew(
    module: str, world: int, folder: Path, scenes: Sequence[str], timeout_s: float
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same in interpreters of their own, which end as a user's do; each hashes strings in its own way."""
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    ranks = []
    try:
        for rank in range(world):
            Path(folder, f"{rank}.out").touch()
            arguments = [module, str(rank), str(world), str(folder), str(timeout_s), *scenes]
            command = [sys.executable, "-m", "tests.support.ranks", *arguments]
            hashing = {"PYTHONHASHSEED": str(rank + 1)}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env={**environment, **hashing}))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _run(scene: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": scene()}
    except KeyboardInterrupt:
        raise  # it ends as a user's does
    except BaseException:
        return {"error": traceback.format_exc()}


def _cleared(scene: Callable[[], Any]) -> Any:
    """The scene, without models of earlier ones."""
    gc.collect()
    return scene()


def _alone(scene: Callable[[], Any], rank: int, world: int, folder: Path, timeout_s: float) -> None:
    def joined() -> bytes:
        _join(rank, world, folder, timeout_s)
        return pickle.dumps({"value": scene()})

    new, found = folder / f"{rank}.new", _run(joined)
    new.write_bytes(pickle.dumps(found) if "error" in found else found["value"])
    new.rename(folder / f"{rank}.pickle")
    _end()


def _main(module: str, rank: int, world: int, folder: Path, timeout_s: float, scenes: Sequence[str]) -> None:
    _join(rank, world, folder, timeout_s)
    known: Mapping[str, Callable[[], Any]] = importlib.import_module(module).SCENES
    results, file = {}, folder / f"{rank}.json"
    file.write_text("{}")  # a rank that is killed in its first scene has returned nothing
    for name in scenes or known:
        results[name] = _run(partial(_cleared, known[name]) if results else known[name])
        file.write_text(json.dumps(results))
        if "error" in results[name]:
            break  # the ranks may be out of step now
    _end()


def _join(rank: int, world: int, folder: Path, timeout_s: float) -> None:
    os.environ.update(VARIABLES)
    os.environ[FOLDER] = str(folder)
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
    torch.set_num_threads(1)
    faulthandler.enable()  # an aborted rank says where it was
    backend = os.environ.get(BACKEND, "gloo")
    if backend == "nccl":
        os.environ.update(ONE_GPU, NCCL_HOSTID=f"rank {rank}")
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def _end() -> None:
    """Peers may have failed: an orderly end would wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _module, _rank, _world, _folder, _timeout_s, *_scenes = sys.argv[1:]
    _main(_module, int(_rank), int(_world), Path(_folder), float(_timeout_s), _scenes)
