"""Ranks under FSDP2 on two emulated nodes of two: the bytes that leave each node in a step.

    python -m tests.process.fsdp_on_nodes OUT.json

Prints nothing; OUT.json gets, by way of sending, the bytes of a step by node.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire_lab import emulate

WIDTH, LAYERS, WORLD, NODES, STEPS = 512, 2, 4, 2, 3
NUMEL = LAYERS * WIDTH * WIDTH
WAYS: dict[str, tuple[str, Any, Any]] = {
    "stock": ("", None, None),
    "flat": ("int8", "int8", None),
    "by nodes": ("int8", "int8", "auto"),
    "int4 by nodes": ("int4", "int8", "auto"),
}
"""Recipe, gather and nodes."""


def sent(recipe: str, gather: Any, nodes: Any) -> list[float]:
    """Bytes that leave each node in a step, from the first rank of each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if recipe:
        gradwire.attach(model, optimizer, recipe, gather=gather, nodes=nodes)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()

    step()
    before = left_node()
    for _ in range(STEPS):
        step()
    after = left_node()
    told = torch.zeros(NODES, dtype=torch.float64)
    if dist.get_rank() % (WORLD // NODES) == 0:
        told[dist.get_rank() // (WORLD // NODES)] = (after - before) / STEPS
    dist.all_reduce(told)
    return [float(each) for each in told]


def left_node() -> int:
    """Bytes that have left this rank's node. No rank sends anything meanwhile."""
    dist.barrier()
    found = emulate.counters()
    assert found is not None
    dist.barrier()
    return found.tx_bytes


def main(out: Path) -> None:
    """A rank, or the launcher of all."""
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group(emulate.backend())
        found = {way: sent(*how) for way, how in WAYS.items()}
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.barrier()
        os._exit(0)
    mode = emulate.enter("auto")
    with emulate.EmulatedNetwork(WORLD, emulate.EmulatedLink(), mode, NODES) as network:
        command = [sys.executable, "-m", "tests.process.fsdp_on_nodes", str(out)]
        ranks = [network.popen(rank, command) for rank in range(WORLD)]
        codes = [rank.wait() for rank in ranks]
    assert not any(codes), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
