"""Two machines: their ranks add up gradients inside a node, and only the sum crosses the network, compressed.

On the first machine, whose address is HOST; on the second with `--node-rank 1`. Without GPUs,
`--nproc-per-node` is a number:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node gpu --master-addr HOST --master-port 29500 two_nodes.py

On one machine, with two nodes of two ranks that it only seems to be:

    gradwire net run --nodes 2 --workers 4 --rate 200mbit -- python examples/two_nodes.py

`nodes="auto"`, the default, goes by `LOCAL_WORLD_SIZE`, which torchrun sets. gloo and NCCL choose a network
interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say which, where they choose the wrong one.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, BATCH = 40, 256


def main(recipe: str = "int8") -> None:
    """Train, then print what gradwire did."""
    on_gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(layers.to(device), device_ids=[local] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = gradwire.attach(model, optimizer, recipe)

    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(2 + dist.get_rank())  # each rank has data of its own
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64, generator=random)
        labels = (inputs @ classes).argmax(dim=1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
