"""Accumulation, float16 autocast with a GradScaler, clipping, and another recipe for some parameters.

    torchrun --nproc-per-node 2 examples/mixed_precision.py

- `no_sync()` for all but the last micro-batch: gradients are compressed and sent once per optimizer step.
- `scaler=` for `attach`: gradient that is not sent yet is remembered without the loss scale.
- `scaler.unscale_` before clipping, as without gradwire. Clipping sees the decompressed mean over ranks.
- `policy=`: the embedding travels in 8 bits, everything else by the recipe.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, MICRO_BATCHES, WORDS = 30, 4, 1000


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """This rank's data: eight words each, and the first of them modulo ten."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    words = torch.randint(0, WORDS, (32, 8), generator=generator)
    return words, words[:, 0] % 10


def main() -> None:
    """Train, then print what gradwire did."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Embedding(WORDS, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    wire = gradwire.attach(
        model,
        optimizer,
        "leader_topk(ratio=0.05)",
        scaler=scaler,
        # The first pattern that matches a name wins. A parameter that matches none travels by the recipe,
        # biases too: with a policy of your own, say so if they should stay dense.
        policy={"0.weight": "int8", "*.bias": "dense"},
    )

    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            words, labels = batch(dist.get_rank(), MICRO_BATCHES * step + micro)
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.float16):
                    outputs = model(words)
                loss = nn.functional.cross_entropy(outputs.float(), labels) / MICRO_BATCHES
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {MICRO_BATCHES * loss.item():.3f}, scale {scaler.get_scale():.0f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
