"""A file per rank in the folder of a checkpoint: no state travels, and every rank takes up its own.

For frameworks whose checkpoints are folders. On another number of ranks, all read the files of all old ranks.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from gradwire.engine.agree import require_agreement
from gradwire.errors import GradwireWarning, RanksDisagree
from gradwire.wire import Wire

NAME = "gradwire"


def save(wire: Wire, folder: str | os.PathLike[str], name: str = NAME) -> None:
    """Write this rank's state to `folder`/NAME-RANK-of-WORLD.pt; call it on all ranks.

    A file appears whole or not at all. Rank 0 removes those of other worlds, which an earlier run may have
    left in the same folder.
    """
    state = wire.state_dict()
    place, rank, world = Path(folder), state["rank"], state["world"]
    place.mkdir(parents=True, exist_ok=True)
    whole = place / f"{name}-{rank}-of-{world}.pt"
    unfinished = whole.with_suffix(".part")
    torch.save(state, unfinished)
    os.replace(unfinished, whole)
    if rank == 0:
        for file in _files(place, name):
            if not file.stem.endswith(f"-of-{world}"):
                file.unlink(missing_ok=True)


def load(wire: Wire, folder: str | os.PathLike[str], name: str = NAME) -> bool:
    """Take up what `save` has written. A collective; says whether there was anything.

    Warns where no rank has a file, as in a checkpoint of training without gradwire. Raises `RanksDisagree`
    where some have one and others not, and what `Wire.load_state_dict` raises.
    """
    engine, control = wire.attached.backward.engine, wire.attached.backward.engine.around.control
    place = Path(folder)
    own = place / f"{name}-{engine.comm.rank}-of-{engine.comm.world}.pt"
    files = [own] if own.exists() else _files(place, name)
    states: list[Any] = []
    refusal: Exception | None = None
    try:
        states = [torch.load(file, weights_only=True) for file in files]
    except Exception as error:  # cut off, or no such file at all: peers wait to hear of it
        refusal = error
    found = "its own state" if files == [own] else f"{len(files)} states of other ranks"
    said = {"the checkpoint": found if refusal is None else f"refused, {refusal}"}
    try:
        wire.attached.worker.call(lambda: require_agreement(said, control))
    except RanksDisagree:
        if refusal is None:
            raise
    if refusal is not None:
        raise ValueError(f"no state of gradwire can be read from {folder}: {refusal}") from refusal
    if not states:
        warnings.warn(
            f"{folder} holds no state of gradwire: training goes on, and what was unsent then is lost",
            GradwireWarning,
            stacklevel=2,
        )
        return False
    wire.load_state_dict(states[0] if files == [own] else states)
    return True


def _files(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}-*-of-*.pt"))
