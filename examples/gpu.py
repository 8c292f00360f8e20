"""One machine with several GPUs, and a slow path between them: PCIe, or the memory of the host.

    torchrun --nproc-per-node gpu examples/gpu.py
    torchrun --nproc-per-node gpu examples/gpu.py "topk(ratio=0.01)"
    torchrun --nproc-per-node 2 examples/gpu.py                       # without GPUs: the same on the CPU

Nothing in the lines of gradwire differs between GPU and CPU: `attach` sees where the gradients are.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, BATCH = 40, 512


def batch(rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's data: noise, and which of ten fixed directions it is closest to."""
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs.to(device), (inputs @ classes).argmax(dim=1).to(device)


def main(recipe: str = "int8") -> None:
    """Train, then print what gradwire did."""
    on_gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(layers.to(device), device_ids=[local] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = gradwire.attach(model, optimizer, recipe)

    for step in range(STEPS):
        inputs, labels = batch(dist.get_rank(), step, device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
