"""Lightning Fabric, with checkpoints that a killed run goes on from bit for bit.

    python examples/with_fabric.py checkpoints
    torchrun --nproc-per-node 2 examples/with_fabric.py checkpoints

Start it again after a kill: it takes up the newest checkpoint in the folder.
"""

import os
import sys
from pathlib import Path

import torch
from lightning import Fabric
from torch import nn

import gradwire
from gradwire.integrations.lightning import Gathered

STEPS, SAVE_EVERY = 16, 4


def main(folder: Path) -> None:
    """Train, save now and then, print what gradwire did."""
    torch.set_num_threads(1)  # ranks share this machine
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)))
    fabric.launch()
    fabric.seed_everything(0)
    classes = torch.randn(64, 10)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)

    wire = gradwire.attach(model, optimizer, "topk(0.05)")

    state = {"model": model, "optimizer": optimizer, "wire": Gathered(wire), "step": 0}
    saved = sorted(folder.glob("*.ckpt"))
    if saved:
        fabric.load(saved[-1], state)
    for step in range(state["step"] + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
        inputs = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ classes).argmax(dim=1))
        fabric.backward(loss)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            fabric.print(f"step {step}: loss {loss.item():.3f}")
            fabric.save(folder / f"{step:04}.ckpt", {**state, "step": step})

    fabric.print(wire.report())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
