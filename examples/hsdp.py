"""Pre-training of a small GPT, sharded inside nodes by FSDP and averaged between them by gradwire.

    torchrun --nproc-per-node 4 examples/hsdp.py            # two nodes of two ranks, all on this machine
    torchrun --nproc-per-node 4 examples/hsdp.py dense

On real nodes, with as many ranks on each as `LOCAL_WORLD_SIZE` says:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT examples/hsdp.py

Each rank of a node holds a shard of the model. What crosses the slow link between nodes is the gradient of a
shard, compressed. What is unsent is kept as a shard, too: on each rank, two planes of its part of the model.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

STEPS, BATCH, CONTEXT, WIDTH, LETTERS = 40, 16, 32, 64, 16


class Block(nn.Module):
    """Causal attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width), as it returns."""
        heads = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, context) letters; returns (batch * context, letters)."""
        x = self.letters(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def batch(rank: int, step: int) -> Tensor:
    """(batch, context + 1): each letter follows from the one before, or comes at random now and then."""
    follows = torch.randperm(LETTERS, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(1000 * step + rank)
    text = [torch.randint(LETTERS, (BATCH,), generator=random)]
    for _ in range(CONTEXT):
        other = torch.randint(LETTERS, (BATCH,), generator=random)
        text.append(torch.where(torch.rand(BATCH, generator=random) < 0.1, other, follows[text[-1]]))
    return torch.stack(text, dim=1)


def main(recipe: str = "int8") -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    per_node = local if local < world else 2
    mesh = init_device_mesh("cpu", (world // per_node, per_node), mesh_dim_names=("nodes", "ranks"))

    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["ranks"])
    fully_shard(model, mesh=mesh["ranks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wire = gradwire.attach(model, optimizer, recipe, replicas=mesh["nodes"])

    for step in range(STEPS):
        text = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
