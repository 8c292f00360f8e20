"""Scenes of several connections between real ranks: bits, order, and an attached model."""

from __future__ import annotations

import gc
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.comm import ProcessGroupComm
from gradwire.comm.ahead import Receive
from gradwire.comm.algorithms import ring_all_gather
from gradwire.comm.groups import borrow, give_back
from gradwire.environment import CONNECTIONS

SIZES = (0, 1, 5, 16_385, 70_001, 1_400_003)
Nodes = tuple[tuple[int, ...], ...]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of many magnitudes, so that another order of addition shows."""
    random = torch.Generator().manual_seed(7 * size + rank)
    scale = 2.0 ** torch.randint(-8, 4, (size,), generator=random)
    return (torch.randn(size, generator=random) * scale).to(dtype)


def results(comm: ProcessGroupComm) -> Iterator[Tensor]:
    """What this rank has of many collectives, several of which are under way at once."""
    for dtype, size in product(DTYPES, SIZES):
        mine = drawn(comm.rank, size, dtype)
        total, ring, passed = mine.clone(), mine.clone(), torch.empty_like(mine)
        gathered = mine.new_empty(comm.world, size)
        rows = torch.stack([mine + to for to in range(comm.world)])
        received = torch.empty_like(rows)
        pending = [
            comm.all_reduce(total),
            comm.all_gather(gathered, mine),
            comm.shift(passed, mine),
            comm.all_reduce(ring, "ring"),
            comm.all_to_all(received, rows),
        ]
        for each in pending if comm.rank % 2 else reversed(pending):
            each.wait()
        yield from (total, gathered, passed, ring, received)


def bits() -> list[bool]:
    """Whether three connections and five leave what one leaves."""
    assert dist.group.WORLD is not None
    comm = ProcessGroupComm(dist.group.WORLD)
    groups = [borrow(dist.group.WORLD) for _ in range(4)]
    one, same = list(results(comm)), []
    for more in (2, 4):
        comm.spread(groups[:more])
        same += [torch.equal(first, second) for first, second in zip(one, results(comm), strict=True)]
    comm.close()
    for group in groups:
        give_back(group)
    return same


def trained(
    connections: str, nodes: Nodes | str | None = None, recipe: str = "dense"
) -> tuple[list[Tensor], int, int]:
    """Parameters after three steps, the connections that the report names, and how many groups there are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.Tanh(), nn.Linear(700, 10))
    with mock.patch.dict(os.environ, {CONNECTIONS: connections}):
        wire = gradwire.attach(
            ddp := nn.parallel.DistributedDataParallel(model),
            optimizer := torch.optim.SGD(model.parameters(), 0.1),
            recipe,
            nodes=nodes,
        )
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    report = wire.report()
    wire.detach()
    return list(model.parameters()), report.connections, len(dist.distributed_c10d._world.pg_names)


def ahead() -> dict[str, Any]:
    """Recipes with receives announced ahead and without, one after the other over the same groups."""
    same = []
    with mock.patch("gradwire.comm.ahead.Receive", wraps=Receive) as receives:
        for recipe in ("dense", "int8", "topk(ratio=0.05)", "powersgd(rank=2)", "gcomp", "dense", "int8"):
            with mock.patch("gradwire._api.connections.LONG_S", math.inf):
                usual, *_ = trained("1", recipe=recipe)
            assert receives.call_count == 0
            with mock.patch("gradwire._api.connections.LONG_S", 0.0):
                for connections in ("1", "3"):
                    mine, *_ = trained(connections, recipe=recipe)
                    same.append(all(torch.equal(*each) for each in zip(usual, mine, strict=True)))
                    same.append(receives.call_count > 3)
            receives.reset_mock()
    return {"same": same}


def ahead_given_back() -> dict[str, Any]:
    """Receives that nobody waits for while a model is attached, and once it has gone."""
    announced: list[weakref.ref[Tensor]] = []
    receive = dist.irecv

    def noted(tensor: Tensor, **options: Any) -> Any:
        announced.append(weakref.ref(tensor))
        return receive(tensor, **options)

    def alive() -> int:
        gc.collect()
        return sum(each() is not None for each in announced)

    with mock.patch("gradwire._api.connections.LONG_S", 0.0), mock.patch.object(dist, "irecv", noted):
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(200, 50))
        wire = gradwire.attach(ddp, recipe="int8")
        for _ in range(4):
            ddp(torch.ones(2, 200)).sum().backward()
        held = alive()
        wire.detach()
        del wire, ddp
        for _ in range(100):
            if alive() == 0:
                break
            time.sleep(0.05)
    return {"held": held, "left": alive()}


def gathers_in_a_ring() -> list[bool]:
    """Whether ranks gather in a ring on long links, alone on nodes and together; whether bits are alike."""
    ways, left = [], []
    with mock.patch("gradwire._api.connections.LONG_S", 0.0):
        for per_node in ("1", "2"):
            with (
                mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": per_node}),
                mock.patch("gradwire.comm.process_group.ring_all_gather", wraps=ring_all_gather) as ring,
            ):
                parameters, *_ = trained("1", "auto", "topk(ratio=0.001)")
            ways.append(ring.called)
            left.append(parameters)
    return [*ways, all(torch.equal(*each) for each in zip(*left, strict=True))]


def attached(nodes: Nodes | None = None) -> dict[str, Any]:
    """One connection, three, and three again."""
    (one, *_), (three, told, made), (_, again, in_all) = (trained(text, nodes) for text in ("1", "3", "3"))
    return {
        "same": all(torch.equal(*each) for each in zip(one, three, strict=True)),
        "told": [told, again],
        "groups": in_all - made,
    }


def refused() -> list[str]:
    """What ranks raise where they were told different numbers, and no number."""
    told = []
    for text in (str(2 + dist.get_rank()), "many"):
        try:
            trained(text)
        except (ValueError, gradwire.RanksDisagree) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


SCENES: dict[str, Callable[[], Any]] = {
    "bits": bits,
    "attached": attached,
    "refused": refused,
    "ahead": ahead,
    "ahead, given back": ahead_given_back,
    "gathers in a ring": gathers_in_a_ring,
    "on nodes": partial(attached, ((0, 1), (2, 3))),
}
