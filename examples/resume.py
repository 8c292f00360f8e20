"""Save a run, and go on with it: on as many ranks, or on more or fewer.

    torchrun --nproc-per-node 2 examples/resume.py checkpoint --until 20
    torchrun --nproc-per-node 2 examples/resume.py checkpoint --until 40
    torchrun --nproc-per-node 3 examples/resume.py checkpoint --until 60

Each rank remembers what it has not sent yet, so `wire.save` writes a file per rank.

- As many ranks as before: every rank goes on with its own state, bit for bit. The second line prints the
  fingerprint that `--until 40` prints without the break.
- Another number of ranks: every rank starts with the mean of all states, so that nothing unsent is lost.

The run may be killed at any moment: `wire.load` finds the newest save that all ranks have made. The model
is saved first, under the step's name, so that its file is there.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's data: noise, and which of ten fixed directions it is closest to."""
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, (inputs @ classes).argmax(dim=1)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """Model and optimizer once, because they are the same on all ranks; gradwire's state once per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"model-{wire.report().step}.pt"
    if dist.get_rank() == 0:
        part = path.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.rename(path)  # whole, or not there
    wire.save(folder / "wire")  # of which the model's file is a part from now on
    if dist.get_rank() == 0:
        for older in set(folder.glob("model-*.pt")) - {path}:
            older.unlink()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> int:
    """The step to go on from."""
    step = wire.load(folder / "wire")
    if step is None:
        return 0
    saved = torch.load(folder / f"model-{step}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return step


def main() -> None:
    """Go on from the checkpoint if there is one, train until a step, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, default=20)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = gradwire.attach(model, optimizer, "topk(ratio=0.05)")

    start = load(options.folder, model, optimizer, wire)
    for step in range(start, options.until):
        inputs, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    save(options.folder, model, optimizer, wire)

    if dist.get_rank() == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        fingerprint = hashlib.sha256(weights).hexdigest()[:12]
        print(f"{dist.get_world_size()} ranks, steps {start} to {options.until}: parameters {fingerprint}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
