"""Save a run, and go on with it: on as many ranks bit for bit, or on more or fewer.

    torchrun --nproc-per-node 2 examples/resume.py checkpoint --until 20
    torchrun --nproc-per-node 2 examples/resume.py checkpoint --until 40    # as without the break
    torchrun --nproc-per-node 3 examples/resume.py checkpoint --until 60

Each rank remembers what it has not sent yet, so `wire.save` writes a file per rank. On another number of
ranks every rank starts with the mean of all states. `elastic.py` saves so that a kill may come at any moment.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main(folder: Path, until: int) -> None:
    """Go on from the checkpoint if there is one, train until a step, save."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = gradwire.attach(model, optimizer, "topk(ratio=0.05)")
    parts = {"model": model, "optimizer": optimizer}  # the same on all ranks

    start = wire.load(folder / "wire") or 0
    if start:
        saved = torch.load(folder / f"model-{start}.pt")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(start, until):
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:  # the model first, so that it is there with the wire's files
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"model-{until}.pt")
    wire.save(folder / "wire")

    if dist.get_rank() == 0:
        fingerprint = torch.hash_tensor(nn.utils.parameters_to_vector(model.parameters()))
        print(f"{dist.get_world_size()} ranks, steps {start} to {until}: parameters {fingerprint.item():x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, default=20)
    main(**vars(parser.parse_args()))
