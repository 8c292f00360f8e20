"""Another recipe for some parameters, by their names and by their size.

    torchrun --nproc-per-node 2 examples/policy.py

The embedding travels in 8 bits, because one-bit and top-k recipes disturb rows that were not used. Biases and
all that is small stay dense: a policy of your own replaces the default, which does that.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, WORDS = 20, 1000

by_size = gradwire.by_size(smallest=4096)


def policy(parameter: gradwire.ParameterSpec) -> str | None:
    """The recipe of a parameter; `None` stands for the one that `attach` is given."""
    return "int8" if parameter.name == "0.weight" else by_size(parameter)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's data: eight words each, and the first of them modulo ten."""
    words = torch.randint(WORDS, (128, 8), generator=torch.Generator().manual_seed(1000 * step + rank))
    return words, words[:, 0] % 10


def main() -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(WORDS, 32), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = gradwire.attach(model, optimizer, "leader_topk(0.05)", policy=policy)

    for step in range(STEPS):
        words, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
