"""A small GPT, sharded over all ranks by FSDP2, whose own traffic travels in few bits.

On one machine: torchrun --nproc-per-node 2 examples/fsdp2.py
With --exact it computes in bfloat16, and gathers send what has changed, without loss.
On two, with `--node-rank 1` on the other:
torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port PORT examples/fsdp2.py
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Of this rank's data: sequences of a stride each."""
    torch.manual_seed(1000 * step + dist.get_rank())
    text = torch.randint(1, 6, (BATCH, 1)) * torch.arange(CONTEXT + 1) % LETTERS
    return nn.functional.cross_entropy(model(text[:, :-1]).float(), text[:, 1:].flatten())


def main() -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model, mesh = GPT(), init_device_mesh("cpu", (dist.get_world_size(),))
    exact = "--exact" in sys.argv
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if exact else None)
    for part in (*model.blocks.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wire = gradwire.attach(model, optimizer, "int4", gather="exact" if exact else "int8")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    with wire.exact(), torch.no_grad():
        loss = loss_of(model, STEPS)
    if dist.get_rank() == 0:
        print(f"with weights as they are saved: loss {loss.item():.3f}")
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
