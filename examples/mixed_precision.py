"""Autocast with a GradScaler and clipping, on GPUs where there are some.

    torchrun --nproc-per-node gpu examples/mixed_precision.py     # or --nproc-per-node 2, on the CPU

- `scaler=` for `attach`: gradient that is not sent yet is remembered without the loss scale.
- `scaler.unscale_` before clipping, as without gradwire. Clipping sees the decompressed mean over ranks.
- With bfloat16 there is no scaler, and `scaler=` is left out.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, WORDS = 30, 1000


def main() -> None:
    """Train, then print what gradwire did."""
    on_gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(WORDS, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU())
    layers.append(nn.Linear(256, 10))
    model = DistributedDataParallel(layers.to(device), device_ids=[local] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    wire = gradwire.attach(model, optimizer, "leader_topk(ratio=0.05)", scaler=scaler)

    for step in range(STEPS):
        # This rank's data: eight words each, and the first of them modulo ten.
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        words = torch.randint(0, WORDS, (128, 8), generator=random).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            outputs = model(words)
        loss = nn.functional.cross_entropy(outputs.float(), words[:, 0] % 10)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}, scale {scaler.get_scale():.0f}")

    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
