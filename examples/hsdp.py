"""A small GPT, sharded inside each of two nodes by FSDP2. gradwire compresses what travels between them.

On one machine: torchrun --nproc-per-node 4 examples/hsdp.py
On two, with `--node-rank 1` on the other:
torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST --master-port PORT examples/hsdp.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

STEPS, BATCH, CONTEXT, WIDTH, LETTERS = 40, 16, 32, 64, 16


class GPT(nn.Module):  # predicts the next letter
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True), 2)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: Tensor) -> Tensor:  # (batch, context)
        causal = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.blocks(self.letters(text) + self.places(torch.arange(CONTEXT)), causal)
        return self.head(x.flatten(0, 1))  # (batch * context, letters)


def main() -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("nodes", "ranks"))
    torch.manual_seed(0)
    model = GPT()
    for part in (*model.blocks.layers, model):
        fully_shard(part, mesh=mesh["ranks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wire = gradwire.attach(model, optimizer, "int8", replicas=mesh["nodes"])
    for step in range(STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())  # this rank's data: sequences of a stride each
        text = torch.randint(1, 6, (BATCH, 1)) * torch.arange(CONTEXT + 1) % LETTERS
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
    main()
