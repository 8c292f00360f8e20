"""How near to linear is a step on a GPU over an emulated link, by way of the host or with codecs on the GPU?

Two ranks share the GPU and take turns on it, so that a step takes twice as long as on one's own; so does the
step without communication that it is compared with. The link is emulated, over gloo. Settings run in mixed
order, round by round, in the same processes; a step's time is the slower rank's. Every round checks that
parameters are bit-identical.

Goal, 100 M parameters at 10 Gbit/s, by way of the host: at least 0.9 of the speed without communication.

    PYTHONPATH=src python benchmarks/gpu_link.py [--rate 10gbit] [--batch 8192] [--rounds 5] [--json PATH]
    PYTHONPATH=src python benchmarks/gpu_link.py --cpu --width 64 --layers 4 --batch 64     # does it run?
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist
from ranks import told_by_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import mixed, paired

WORKERS = 2
ALONE = "no communication"
DDP = "DDP over gloo"
RECIPES = ("int8", "topk(ratio=0.01)")
PLACEMENTS = tuple(each for each in get_args(PlacementName) if each != "auto")


class Setting:
    """One way to train, on one rank."""

    def __init__(
        self, device: torch.device, options: argparse.Namespace, recipe: str, place: PlacementName
    ) -> None:
        torch.manual_seed(0)
        width = options.width
        layers = [
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(options.layers)
        ]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers).to(device))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self._quiet = recipe == ALONE
        self._inputs = torch.randn(options.batch, width, device=device)
        if recipe not in (ALONE, DDP):
            gradwire.attach(self.ddp, self.optimizer, recipe, placement=place)

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        with self.ddp.no_sync() if self._quiet else nullcontext():
            self.ddp(self._inputs).square().mean().backward()
        self.optimizer.step()

    def check(self) -> None:
        """Raise unless both ranks have the same bits."""
        words = torch.cat([p.detach().view(-1) for p in self.ddp.parameters()]).view(torch.int32).cpu().long()
        ends = torch.stack([words.sum(), -words.sum()])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise AssertionError("parameters differ between ranks")


def settings_of(device: torch.device, options: argparse.Namespace) -> dict[str, Setting]:
    """All, by their names."""
    found = {name: Setting(device, options, name, "auto") for name in (ALONE, DDP)}
    for place in PLACEMENTS:
        for recipe in RECIPES:
            found[f"{recipe}, placement={place}"] = Setting(device, options, recipe, place)
    return found


def worker(options: argparse.Namespace) -> None:
    """One rank: time all settings, and write what came of them on rank 0."""
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    dist.init_process_group(emulate.backend())
    settings = settings_of(device, options)
    rows: dict[str, list[float]] = {name: [] for name in settings}
    for setting in settings.values():
        for _ in range(3):
            setting.step()
    for number in range(options.rounds):
        for name, setting in mixed(list(settings.items()), number):
            _wait(device)
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(options.steps):
                setting.step()
            _wait(device)
            spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            rows[name].append(float(spent) / options.steps)
            if name != ALONE:
                setting.check()
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps({"step_s": rows}), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(found: dict[str, Any]) -> None:
    """A line for each setting; and the speeds into `found`."""
    alone, found["speeds"] = found["step_s"][ALONE], {}
    print(f"{'setting':<40}{'step ms':>9}  speed beside no communication, 95 %")
    for name, times in found["step_s"].items():
        speed = paired(alone, times)
        found["speeds"][name] = speed.ratio
        print(
            f"{name:<40}{1e3 * median(times):>9.1f}  {speed.ratio:.3f} ({speed.low:.3f} to {speed.high:.3f})"
        )


def main() -> None:
    """Start ranks on the network, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24, help="of width² parameters each")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options)
        return
    if not options.cpu and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device: nothing is measured. With one this would be:")
        print(f"  {ALONE}, {DDP}, {' and '.join(RECIPES)} with placement={' and '.join(PLACEMENTS)}")
        return
    found = told_by_ranks(WORKERS, options.rate)
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
