"""Ranks of sites that find each other by torchft's lighthouse: each notes its rounds in a file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.agreement.agree import checksum
from gradwire.sources.delta import Delta
from gradwire.step.optimizers import local
from tests.support.models import perceptron
from tests.support.ranks import VARIABLES

NO_MEMORY = MemoryError("no memory")
EVERY = 3


def trained(
    lighthouse: str,
    name: str,
    folder: Path,
    rounds: int,
    *,
    kind: str = "one rank",
    rank: int = 0,
    group_s: float = 60.0,
    pause_s: float = 0.0,
    breaks_at: int = 0,
) -> None:
    """Train until there were `rounds` rounds, as `rank` of a site of two by DDP or FSDP2, or of one rank.

    `group_s` is the limit of the site's own process group, and `pause_s` passes after each round. The second
    rank has no memory for the first exchange after `breaks_at` rounds.
    """
    os.environ.update(VARIABLES)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    model: nn.Module = perceptron(sum(map(ord, name)))
    if kind != "one rank":
        store = f"file://{folder}/{name}.store"
        limit = timedelta(seconds=group_s)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(rank + sum(map(ord, name)))
    with (folder / f"{name}.{rank}.jsonl").open("a") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        note(asks=True)
        members = gradwire.members.torchft(lighthouse, name)
        wire = gradwire.outer(model, optimizer, "int4", every=EVERY, members=members)

        def shared() -> list[int]:
            with wire.shared_parameters():
                return [checksum(local(each)) for each in model.parameters()]

        note(begun=wire.rounds, shared=shared())
        seen = wire.rounds
        while wire.rounds < rounds:
            optimizer.zero_grad()
            model(torch.randn(8, 32, generator=random)).square().mean().backward()
            lacks_memory = rank == 1 and 0 < breaks_at <= seen
            with patch.object(Delta, "pack", side_effect=NO_MEMORY) if lacks_memory else nullcontext():
                try:
                    optimizer.step()
                except Exception as error:
                    note(error=f"{type(error).__name__}: {error}")
                    os._exit(1)
            if wire.rounds != seen:
                seen = wire.rounds
                note(rounds=seen, members=wire.members, shared=shared())
                time.sleep(pause_s)
        wire.detach()
    os._exit(0)  # the other rank may be gone by now
