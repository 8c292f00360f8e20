"""A run that saves after every step and is killed while it does, to be started again in the same folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import optimizer_of, perceptron, train
from tests.support.ranks import FOLDER
from tests.support.states import own_state


def _fingerprint(wire: gradwire.Wire) -> str:
    state = own_state(wire)
    digest = hashlib.sha256()
    for _, memory in sorted(state["memory"].items()):
        digest.update(memory.numpy().tobytes())
    return f"{state['step']} {digest.hexdigest()[:16]}"


def save_until_killed() -> None:
    """Go on from the folder, and note what is loaded, what is about to be saved, and what has been."""
    folder = Path(os.environ[FOLDER]).parent  # which the worlds share that follow each other
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    with (folder / f"log-{dist.get_rank()}").open("a") as log:

        def note(what: str) -> None:
            print(what, _fingerprint(wire), file=log, flush=True)

        wire.load(folder / "saved")
        note("loaded")
        for step in range(1_000_000):
            train(ddp, optimizer, range(step, step + 1))
            note("saving")
            wire.save(folder / "saved")
            note("saved")
            print("saved", flush=True)


SCENES: dict[str, Callable[[], Any]] = {"save": save_until_killed}
