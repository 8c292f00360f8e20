"""Two sites: each trains by itself, and every 20 steps they exchange what they have learned, compressed.

At the first site, whose address is HOST, and at the second with `--node-rank 1`. A site may have several
ranks, with DDP inside:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 two_sites.py

On one machine, which then counts as two sites:

    torchrun --nproc-per-node 4 two_sites.py

`LOCAL_WORLD_SIZE` says how many ranks share a machine. `diloco` sends every value; the first argument may
name any fixed recipe instead, such as `int4`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, BATCH, EVERY = 60, 256, 20


def main(recipe: str = "diloco") -> None:
    """Train, then print what the rounds did."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ranks, world = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    ranks = ranks // 2 if ranks == world else ranks
    mesh = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("sites", "ranks"))
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(layers, process_group=mesh.get_group("ranks"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = gradwire.outer(model, optimizer, recipe, every=EVERY, replicas=mesh["sites"])

    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(2 + dist.get_rank())  # each rank has data of its own
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64, generator=random)
        labels = (inputs @ classes).argmax(dim=1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()  # every 20th runs a round
        if dist.get_rank() == 0 and step % EVERY == EVERY - 1:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    report = wire.report()
    if dist.get_rank() == 0:
        sent_kb = report.wire_bytes_per_step / 1e3
        print(f"{world // ranks} sites, {report.step} rounds, {sent_kb:.0f} kB sent per rank and round")
    wire.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
