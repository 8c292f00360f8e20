"""Hugging Face Accelerate, with checkpoints that a killed run goes on from bit for bit.

    accelerate launch --cpu --num_processes 2 examples/with_accelerate.py checkpoints
    torchrun --nproc-per-node 2 examples/with_accelerate.py checkpoints

Start it again after a kill: it takes up the newest checkpoint in the folder.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from gradwire.integrations.accelerate import register_for_checkpointing

STEPS, MICRO_BATCHES, SAVE_EVERY = 16, 2, 4


def main(folder: Path) -> None:
    """Train, save now and then, print what gradwire did."""
    torch.set_num_threads(1)  # ranks share this machine
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    set_seed(0)
    inputs = torch.randn(2 * STEPS * MICRO_BATCHES * 32, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    wire = gradwire.attach(model, optimizer, "topk(0.05)")
    register_for_checkpointing(accelerator, wire)

    step = max((int(path.name) for path in folder.glob("*")), default=0)
    if step:
        accelerator.load_state(str(folder / str(step)))
    for batch, (examples, classes) in enumerate(skip_first_batches(loader, step * MICRO_BATCHES)):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(examples), classes)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and (batch + 1) % (SAVE_EVERY * MICRO_BATCHES) == 0:
            at = step + (batch + 1) // MICRO_BATCHES
            accelerator.print(f"step {at}: loss {loss.item():.3f}")
            accelerator.save_state(str(folder / str(at)))

    accelerator.print(wire.report())
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
