"""Several micro-batches before an optimizer step: gradients are compressed and sent once.

    torchrun --nproc-per-node 2 examples/accumulation.py

`no_sync()` belongs around all but the last micro-batch. Without it each of them is compressed and sent, and
gradwire warns.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, MICRO_BATCHES = 20, 4


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """This rank's data: noise, and which of ten fixed directions it is closest to."""
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * number + rank))
    return inputs, (inputs @ classes).argmax(dim=1)


def main() -> None:
    """Train, then print how much was sent."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = gradwire.attach(model, optimizer, "int8")

    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            inputs, labels = batch(dist.get_rank(), MICRO_BATCHES * step + micro)
            with nullcontext() if micro == MICRO_BATCHES - 1 else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), labels) / MICRO_BATCHES
                loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {MICRO_BATCHES * loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
