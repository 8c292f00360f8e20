"""A training loop with gradwire, and its report.

    torchrun --nproc-per-node 2 examples/ddp.py                    # gradwire decides
    torchrun --nproc-per-node 2 examples/ddp.py "topk(ratio=0.01)" # you decide
    gradwire net run --workers 2 --rate 100mbit -- python examples/ddp.py

The third line runs it over an emulated slow link, where there is something to gain. On a fast link `auto`
keeps plain all-reduce, and the report says so.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS = 80
BATCH = 1024


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's data: noise, and which of ten fixed directions it is closest to."""
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, (inputs @ classes).argmax(dim=1)


def main(recipe: str = "auto") -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = gradwire.attach(model, optimizer, recipe)

    for step in range(STEPS):
        inputs, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
