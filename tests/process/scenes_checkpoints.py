"""Scenes of the two ways in which frameworks save: a file per rank, and all states gathered on rank 0."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.integrations import rank_files
from gradwire.integrations.lightning import Gathered
from tests.support.models import optimizer_of, perceptron, train
from tests.support.states import own_state

RECIPE = "topk(ratio=0.05)"


def _attached(group: Any = None, steps: int = 0) -> gradwire.Wire:
    ddp = DistributedDataParallel(perceptron(), process_group=group)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, RECIPE)
    train(ddp, optimizer, range(steps))
    return wire


def _folder() -> Path:
    """The same on all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(str(made[0]))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    memory, theirs = one["memory"], other["memory"]
    return bool(memory) and all(torch.equal(memory[name], theirs[name]) for name in memory)


def files() -> dict[str, Any]:
    """Saved on three ranks; taken up on three, and on two of them, where the mean goes on."""
    wire, folder = _attached(steps=5), _folder()
    rank_files.save(wire, folder)
    dist.barrier()
    written = sorted(path.name for path in (folder / rank_files.NAME).iterdir())
    again = _attached()
    taken = rank_files.load(again, folder)
    found: dict[str, Any] = {
        "written": written,
        "taken": taken,
        "same": _same(own_state(again), own_state(wire)),
        "step": again.report().step,
        "own": own_state(wire)["memory"]["0.weight"].sum().item(),
    }
    mean, pair = wire.mean_state_dict()["mean"], dist.new_group([0, 1])
    if dist.get_rank() < 2:
        smaller = _attached(pair)
        rank_files.load(smaller, folder)
        memory = own_state(smaller)["memory"]
        # One adds thirds, the other divides a sum: a few roundings of float32 apart, of numbers below 1.
        found["mean"] = all(torch.allclose(memory[name], mean["memory"][name], atol=1e-6) for name in memory)
        rank_files.save(smaller, folder)
        dist.barrier(pair)
        found["left"] = sorted(path.name for path in (folder / rank_files.NAME).iterdir())
    dist.barrier()
    return found


def no_files() -> list[str]:
    """A checkpoint of training without gradwire."""
    wire, folder = _attached(), _folder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not rank_files.load(wire, folder)
    return [str(each.message) for each in caught]


def a_broken_file() -> list[str]:
    """Rank 1's is cut off; then it is gone."""
    wire, folder = _attached(steps=3), _folder()
    rank_files.save(wire, folder)
    said = []
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:1000]), Path.unlink):
        dist.barrier()
        if dist.get_rank() == 1:
            [file] = (folder / rank_files.NAME).glob("*-rank-1-of-3.pt")
            damage(file)
        dist.barrier()
        try:
            rank_files.load(_attached(), folder)
            said.append("nothing")
        except (ValueError, FileNotFoundError, gradwire.PeerFailed) as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def gathered() -> dict[str, Any]:
    """What a saver on rank 0 would write, and all ranks would read."""
    wire = _attached(steps=5)
    saved = [Gathered(wire).state_dict()]
    held = len(saved[0]["ranks"])
    dist.broadcast_object_list(saved)
    again = _attached()
    Gathered(again).load_state_dict(saved[0])
    return {"held": held, "same": _same(own_state(again), own_state(wire))}


SCENES: dict[str, Callable[[], Any]] = {
    "files": files,
    "no files": no_files,
    "broken": a_broken_file,
    "gathered": gathered,
}
