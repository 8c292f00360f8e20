"""Ray Train's TorchTrainer. After a failure, Ray starts all workers again, and they go on bit for bit.

    python examples/with_ray.py checkpoints

Start it again after a kill: it goes on from the newest checkpoint in the folder.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire

EPOCHS, BATCHES = 4, 4


def work() -> None:
    """Train on one worker, and report to Ray after every epoch."""
    torch.manual_seed(0)
    inputs = torch.randn(2 * BATCHES * 32, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    loader = prepare_data_loader(DataLoader(TensorDataset(inputs, labels), batch_size=32))
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = gradwire.attach(model, optimizer, "topk(0.05)")
    start = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            wire.load(Path(folder, "wire"))
            start, *states = torch.load(Path(folder, "model.pt"))
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for epoch in range(start, EPOCHS):
        for examples, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(examples), classes)
            loss.backward()
            optimizer.step()
        with TemporaryDirectory() as folder:  # Ray puts the files of all workers into one checkpoint
            wire.save(Path(folder, "wire"))
            if train.get_context().get_world_rank() == 0:
                torch.save((epoch + 1, model.state_dict(), optimizer.state_dict()), Path(folder, "model.pt"))
            train.report({"loss": loss.item()}, checkpoint=train.Checkpoint.from_directory(folder))
    if train.get_context().get_world_rank() == 0:
        print(wire.report())


if __name__ == "__main__":
    again = train.FailureConfig(max_failures=3)
    run = train.RunConfig(name="run", storage_path=str(Path(sys.argv[1]).resolve()), failure_config=again)
    TorchTrainer(work, scaling_config=train.ScalingConfig(num_workers=2), run_config=run).fit()
