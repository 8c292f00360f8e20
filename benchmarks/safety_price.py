"""What do checksums and the guard of replicas add to a step?

Ranks on an emulated network train a stack of square matrices on random numbers. Settings run in mixed order,
round by round, in the same processes; each recipe runs twice without safety, and the ratio of the two says
how far apart equal settings are. A step's time is the slowest rank's, CPU seconds are of all ranks. Every
round checks that the replicas of a setting are bit-identical; the settings of one recipe must end with equal
parameters, on two ranks also where sums go by hops of our own.

The guard looks in every step here, where it is 100 times as easy to measure: a hundredth of what it adds is
its price with `guard_every=100`.

Goals: checksums on gathered payloads (`topk`) at most 1.03 times the step, the guard in every 100th step at
most 1.005 times. Sums by own hops (`dense`) are reported.

    python benchmarks/safety_price.py [--workers 2] [--rate 200mbit] [--rounds 15] [--steps 4] [--json PATH]
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from ranks import told_by_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import mixed, paired

RECIPES = ("topk(ratio=0.01)", "int8(collective='all_gather')", "dense")
WITHOUT = "without"
SAFETY: dict[str, dict[str, Any]] = {
    WITHOUT: {},
    "without again": {},
    "checksums": {"checksums": True},
    "guard": {"guard_every": 1},
}
GOAL_CHECKSUMS, GOAL_GUARD, EVERY = 1.03, 1.005, 100
WIDTH, LAYERS, BATCH = 1024, 4, 64
WARM_UP = 3

Rows = dict[str, dict[str, list[float]]]


class Setting:
    """One way to train, on one rank."""

    def __init__(self, recipe: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.wire = gradwire.attach(self.model, self._optimizer, recipe, nodes=None, **options)
        self._draw = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad()
        inputs = torch.randn(BATCH, WIDTH, generator=self._draw)
        self.model(inputs).square().mean().backward()
        self._optimizer.step()

    def parameters(self) -> Tensor:
        """All of them, the same on all ranks, or the program ends."""
        mine = torch.cat([each.detach().view(-1) for each in self.model.parameters()])
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            raise SystemExit("replicas differ")
        return mine


def worker(options: argparse.Namespace) -> None:
    """One rank: time all settings, and write what came of them on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    settings = {
        f"{recipe}: {name}": Setting(recipe, how) for recipe in RECIPES for name, how in SAFETY.items()
    }
    rows: Rows = {name: {"step_s": [], "cpu_s": []} for name in settings}
    for setting in settings.values():
        for _ in range(WARM_UP):
            setting.step()
    for number in range(options.rounds):
        for name, setting in mixed(list(settings.items()), number):
            dist.barrier()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                setting.step()
            spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
            worked = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            dist.all_reduce(worked)
            rows[name]["step_s"].append(float(spent) / options.steps)
            rows[name]["cpu_s"].append(float(worked) / options.steps)
            setting.parameters()
    _require_equal(settings)
    for name, setting in settings.items():
        report = setting.wire.report()
        rows[name]["added"] = [report.checksum_bytes / (report.step * report.wire_bytes_per_step)]
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def _require_equal(settings: dict[str, Setting]) -> None:
    """Safety changes no number. More than two ranks add in another order where hops are our own."""
    for recipe in RECIPES:
        if dist.get_world_size() > 2:
            continue
        first, *others = (settings[f"{recipe}: {name}"].parameters() for name in SAFETY)
        if not all(torch.equal(first, other) for other in others):
            raise SystemExit(f"{recipe}: parameters differ between settings")


def show(rows: Rows) -> None:
    """A line for each setting, then the goals."""
    print(f"{'':<46}{'step ms':>9}{'CPU ms':>9}{'bytes':>9}  over the same without, 95 %")
    for name, row in rows.items():
        base = rows[f"{name.partition(': ')[0]}: {WITHOUT}"]
        found = paired(row["step_s"], base["step_s"])
        times = f"{1e3 * median(row['step_s']):>9.1f}{1e3 * fmean(row['cpu_s']):>9.1f}"
        share = f"{1.0 + row['added'][0]:>9.4f}"
        print(f"{name:<46}{times}{share}  {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})")
    for recipe in RECIPES[:2]:
        base = rows[f"{recipe}: {WITHOUT}"]["step_s"]
        checks = paired(rows[f"{recipe}: checksums"]["step_s"], base).ratio
        guard = 1.0 + (paired(rows[f"{recipe}: guard"]["step_s"], base).ratio - 1.0) / EVERY
        for what, price, goal in (("checksums", checks, GOAL_CHECKSUMS), ("guard", guard, GOAL_GUARD)):
            print(f"{recipe}, {what}: {price:.4f}, goal {goal}: {'met' if price <= goal else 'missed'}")


def main() -> None:
    """Start ranks on the network, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options)
        return
    rows = told_by_ranks(options.workers, options.rate, options.delay)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
