"""Save a run, and go on with it: on as many ranks, or on more or fewer.

    torchrun --nproc-per-node 2 examples/resume.py checkpoint --until 20
    torchrun --nproc-per-node 2 examples/resume.py checkpoint --until 40
    torchrun --nproc-per-node 3 examples/resume.py checkpoint --until 60

Each rank remembers what it has not sent yet, so each rank saves a state of its own.

- As many ranks as before: every rank loads its own state, and the run goes on bit for bit. The second line
  prints the fingerprint that `--until 40` prints without the break.
- Another number of ranks: every rank loads the list of all states. It starts with their mean, so that nothing
  unsent is lost.
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


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire
) -> None:
    """Model and optimizer once, because they are the same on all ranks; gradwire's state once per rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(wire.state_dict(), folder / f"wire-{rank}.pt")
    if rank == 0:
        common = {
            "step": step,
            "world": world,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(common, folder / "common.pt")
    dist.barrier()  # no rank goes on before all files are there


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> int:
    """The step to go on from."""
    if not (folder / "common.pt").exists():
        return 0
    common = torch.load(folder / "common.pt")
    model.load_state_dict(common["model"])
    optimizer.load_state_dict(common["optimizer"])
    states = [torch.load(folder / f"wire-{rank}.pt") for rank in range(common["world"])]
    same_world = common["world"] == dist.get_world_size()
    wire.load_state_dict(states[dist.get_rank()] if same_world else states)
    return int(common["step"])


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
    save(options.folder, options.until, model, optimizer, wire)

    if dist.get_rank() == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        fingerprint = hashlib.sha256(weights).hexdigest()[:12]
        print(f"{dist.get_world_size()} ranks, steps {start} to {options.until}: parameters {fingerprint}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
