"""A training loop without a wrapper: gradwire averages the gradients of a plain module.

    torchrun --nproc-per-node 2 examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py dense

`replicas=` names the ranks that train copies of the model; they begin with rank 0's parameters. A batch has
two micro-batches: within `wire.no_sync()` gradients only add up, and the second backward pass sends the sum.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire

STEPS, BATCH = 40, 512


def batch(rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """This rank's data: noise, and which of ten fixed directions it is closest to."""
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    seed = 1000 * (2 * step + micro) + rank
    inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs @ classes).argmax(dim=1)


def main(recipe: str = "int8") -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(dist.get_rank())  # of no consequence for the model, see above
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)

    def backward(step: int, micro: int) -> Tensor:
        inputs, labels = batch(dist.get_rank(), step, micro)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (loss / 2).backward()
        return loss

    for step in range(STEPS):
        optimizer.zero_grad()
        with wire.no_sync():
            backward(step, micro=0)
        loss = backward(step, micro=1)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
