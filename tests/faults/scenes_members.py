"""A member that trains: a process that notes its rounds, and can be killed or stopped in any of them."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroupGloo

import gradwire
from gradwire.agreement.agree import checksum
from gradwire.environment import CONNECTIONS
from tests.support.lighthouse import Asking
from tests.support.models import perceptron
from tests.support.ranks import VARIABLES

EVERY = 3
ALONE = 10 * EVERY
"""Steps since a round after which a member that has none notes it."""


def trained(
    port: int,
    name: str,
    folder: Path,
    rounds: int,
    recipe: str,
    options: dict[str, Any],
    pause_s: float = 0.0,
) -> None:
    """Train until there were `rounds` rounds; a line for each, with a checksum of the shared parameters."""
    os.environ.update(VARIABLES)
    torch.set_num_threads(1)
    with ExitStack() as patches:
        if connect_s := options.pop("connect_s", None):
            os.environ[CONNECTIONS] = "2"
            patches.enter_context(patch("gradwire.members.membership.CONNECT_S", connect_s))
        if nth := options.pop("dies_making", 0):
            patches.enter_context(dying(nth))
        _train(port, name, folder, rounds, recipe, options, pause_s)


@contextmanager
def dying(nth: int) -> Iterator[None]:
    """This process kills itself when it makes its `nth` group."""
    make, made = ProcessGroupGloo.create_device, 0

    def making(**options: Any) -> Any:
        nonlocal made
        made += 1
        if made == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(**options)

    with patch.object(ProcessGroupGloo, "create_device", making):
        yield


class Warnings(logging.Handler):
    """What gradwire has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _train(
    port: int, name: str, folder: Path, rounds: int, recipe: str, options: dict[str, Any], pause_s: float
) -> None:
    model = perceptron(sum(map(ord, name)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asks = {key: options.pop(key) for key in ("alone_s", "quorum_s", "host", "address") if key in options}
    members = Asking(port, name, **asks)
    warned, factor = Warnings(), torch.nan if options.pop("nan", False) else 1.0
    logging.getLogger("gradwire").addHandler(warned)
    saves_under_way = options.pop("saves_under_way", False)
    with (folder / f"{name}.jsonl").open("a") as notes:

        def note(**what: Any) -> None:
            notes.write(json.dumps(what) + "\n")
            notes.flush()

        saves = options.pop("saves", False)
        if saves or saves_under_way:
            options["resume"] = folder / f"saves of {name}"
        try:
            wire = gradwire.outer(model, optimizer, recipe, every=EVERY, members=members, **options)
        except Exception as error:
            note(error=f"{type(error).__name__}: {error}")
            raise
        note(begun=wire.rounds, shared=_checksum(wire, model), **kept())
        random = torch.Generator().manual_seed(sum(map(ord, name)))
        seen, counted = wire.rounds, wire.attempts
        while wire.rounds < rounds:
            inputs = torch.randn(8, _width(model), generator=random)
            optimizer.zero_grad()
            (factor * model(inputs).square().mean()).backward()
            try:
                optimizer.step()
            except Exception as error:
                note(error=f"{type(error).__name__}: {error}")
                raise
            if saves_under_way and wire.attempts % EVERY == 1:
                wire.save(folder / f"saves of {name}")
                note(saved=wire.rounds)
            if wire.attempts - counted == ALONE and wire.rounds == seen:
                if saves:
                    wire.save(folder / f"saves of {name}")
                note(alone=wire.attempts, report=str(wire.report()))
            if wire.rounds != seen:
                seen, steps, counted = wire.rounds, wire.attempts - counted, wire.attempts
                shared, own = _checksum(wire, model), str([checksum(each) for each in model.parameters()])
                if saves:
                    wire.save(folder / f"saves of {name}")
                note(rounds=seen, members=wire.members, steps=steps, shared=shared, own=own, **kept())
                time.sleep(pause_s)
        events = [[each.what, list(each.who), each.seconds, each.sent_bytes] for each in wire.events]
        note(events=events, report=str(wire.report()), warned=warned.texts)
        wire.detach()


def kept() -> dict[str, Any]:
    """The time, and how many open files and threads this process has, without garbage that Python has not
    noticed yet.
    """
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return {"at": time.time(), "files": files, "threads": threads}


def _checksum(wire: gradwire.OuterWire, model: nn.Module) -> str:
    with wire.shared_parameters():
        return str([checksum(each) for each in model.parameters()])


def _width(model: nn.Module) -> int:
    return next(each.in_features for each in model.modules() if isinstance(each, nn.Linear))
