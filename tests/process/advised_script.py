"""A training script that `gradwire advise` watches. It knows nothing of gradwire, unless it is told to.

advised_script.py FOLDER MODE...
"""

from __future__ import annotations

import atexit
import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, TRACED = 24, 4, 6


class Slow(nn.Module):
    """A forward pass that takes 20 ms."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.02)
        return inputs


class Noise(Dataset[Tensor]):
    """Random inputs, each of which takes `sleep_s` to get."""

    def __init__(self, rank: int, sleep_s: float) -> None:
        self.rank, self.sleep_s = rank, sleep_s

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, place: int) -> Tensor:
        time.sleep(self.sleep_s)
        return torch.randn(64, generator=torch.Generator().manual_seed(1000 * self.rank + place))


def main(folder: Path, *modes: str) -> None:
    """Train, and leave a hash of the parameters in the folder."""
    torch.set_num_threads(1)
    if "alone" in modes:
        return
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    sites = [dist.new_group([each]) for each in range(dist.get_world_size())] if "carried" in modes else []
    model = DistributedDataParallel(
        nn.Sequential(
            *([Slow()] if "accumulates" in modes else []),
            *(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 7)),
        ),
        process_group=sites[rank] if sites else None,
    )
    # gloo may hang when its connections are freed after the group: DDP stays until the process ends.
    atexit.register(model.modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "hooked" in modes:
        model.register_comm_hook(None, fp16_compress_hook)
    if "attached" in modes:
        import gradwire

        gradwire.attach(model, optimizer, "int8")
    if "carried" in modes:
        import gradwire

        gradwire.outer(model, optimizer, every=3, replicas=dist.group.WORLD)
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if "workers" in modes else {}
    loader = DataLoader(Noise(rank, 0.01 if "slow_input" in modes else 0.0), batch_size=BATCH, **workers)
    recorded = profile(activities=[ProfilerActivity.CPU], record_shapes=True) if "traced" in modes else None
    try:
        for step, inputs in enumerate(loader):
            if recorded is not None and step == STEPS - TRACED:
                recorded.start()
            if "early" in modes and step == 12:
                break
            if "raises" in modes and step == 12:
                raise ArithmeticError("the loss is no number")
            if "slow_rank" in modes and rank == 1:
                time.sleep(0.04)
            optimizer.zero_grad()
            if "accumulates" in modes:
                with model.no_sync():
                    for _ in range(4):
                        model(inputs).square().mean().backward()
            model(inputs).square().mean().backward()
            optimizer.step()
    finally:
        (folder / f"{rank}.ended").write_text(f"{step} {sys.argv[1:]}")
    if recorded is not None:
        recorded.stop()
        recorded.export_chrome_trace(str(folder / f"{rank}.json.gz"))
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    (folder / f"{rank}.sha").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
