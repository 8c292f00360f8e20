"""Training that goes on by itself when workers die, come, or leave.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # or gloo finds the addresses of dead workers
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py checkpoint --until 60
    torchrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 \\
        examples/elastic.py checkpoint --until 60    # on every machine that takes part

When a worker ends, torchrun starts all of them again, on as many as there are: the script goes on from the
newest save that all ranks have made. The folder must be seen by all ranks. As many ranks as before go on bit
for bit; others start with the mean of what was unsent. If files are lost with a machine, `wire.load` says so
and stops: pass `missing="drop"` to go on without what its rank had not sent.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Go on from the newest save, train, and save every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, default=60)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # ranks share this machine
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = gradwire.attach(model, optimizer, "topk(ratio=0.05)")

    options.folder.mkdir(exist_ok=True)
    start = wire.load(options.folder / "wire") or 0
    if start:
        model.load_state_dict(torch.load(options.folder / f"model-{start}.pt"))
    for step in range(start, options.until):
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            if dist.get_rank() == 0:  # the model first, so that it is there with the wire's files
                torch.save(model.state_dict(), options.folder / f"model-{step + 1}.pt")
            wire.save(options.folder / "wire")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, steps {start} to {options.until}: loss {loss.item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
