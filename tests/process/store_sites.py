"""Ranks of sites that meet in a folder: each notes its rounds in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from tests.support.models import batch, perceptron
from tests.support.ranks import VARIABLES

EVERY, GROUP_S = 3, 30.0
STOP = "stop"
"""A file that ends all that train."""


@contextmanager
def broken() -> Iterator[None]:
    """A process without memory for an offer."""
    with patch.object(Delta, "pack", side_effect=MemoryError("no memory")):
        yield


def trained(folder: Path, name: str, start: int, rank: int, kind: str, breaks_at: int = 0) -> None:
    """Train as `rank` of a site of two, by DDP or FSDP2, until there is the file `STOP`.

    `start` tells the starts of a site apart. The second rank has no memory for its first offer after
    `breaks_at` rounds.
    """
    os.environ.update(VARIABLES)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}.{start}.store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_S),
    )
    model: nn.Module = perceptron(sum(map(ord, name)))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (folder / f"{name}.{rank}.jsonl").open("a") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps({"start": start, **what}) + "\n")
            file.flush()

        members = gradwire.members.store(
            f"{folder}/run", name, at_least=1, beat_s=1.0, patience_s=60.0, snapshot_every=3, wait_s=300.0
        )
        wire = gradwire.outer(model, optimizer, "topk(ratio=0.2)", every=EVERY, members=members)

        def shared() -> list[int]:
            with wire.shared_parameters():
                return [checksum(local(each)) for each in model.parameters()]

        note(rounds=wire.rounds, members=[], shared=shared())
        seen, step = wire.rounds, 0
        try:
            while True:
                has_ended = torch.tensor(float((folder / STOP).exists()))  # as the first rank sees it
                dist.broadcast(has_ended, 0)
                if has_ended:
                    break
                step += 1
                inputs, targets = batch(step, rank)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                with broken() if rank == 1 and 0 < breaks_at <= wire.rounds else nullcontext():
                    optimizer.step()
                if wire.rounds != seen:
                    seen = wire.rounds
                    note(rounds=seen, members=wire.members, shared=shared())
                time.sleep(0.05)
            wire.detach()
            note(rounds=wire.rounds, members=wire.members, shared=shared(), ended=True)
            dist.barrier()
        except Exception as error:
            note(error=f"{type(error).__name__}: {error}")
            os._exit(1)
    os._exit(0)
