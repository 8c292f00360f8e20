"""What do several connections per link gain, and receives announced ahead, where a round trip is long?

Ranks on an emulated network, whose namespaces allow buffers of `--window` bytes for a connection (0: as much
as the link needs); about 0.6 of that is the window.
A stack of linear layers is trained on random numbers over 1, 2, 4 and 8 connections, over one once more, and
over one where receives are announced when they are due. The ratio of the two that are equal says how far
apart equal settings are. Settings run in mixed order, round by round, in the same processes, `--steps` steps
a turn, and the time of a turn is the slowest rank's. Several steps a turn are needed where latencies count:
ranks leave a barrier up to a latency apart, which one step takes for its own. All settings must end with the
same bits. At last comes what gradwire measures and chooses by itself, and how long that takes.

    python benchmarks/connections.py [--workers 2] [--rate 300mbit] [--delay 25ms] [--window 524288]
        [--recipe dense] [--width 512] [--settings "1;1 again;when due"] [--rounds 7] [--steps 1]
        [--json PATH]
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import told_by_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.connections import connect_more
from gradwire.comm import ProcessGroupComm
from gradwire.comm.groups import borrow
from gradwire.environment import CONNECTIONS
from gradwire.planning.costs import LONG_S
from gradwire_lab.bench.statistics import mixed, paired
from gradwire_lab.emulate.ranks import INTERFACE_VARIABLE

ONE = "1"
SETTINGS = {ONE: 1, "1 again": 1, "when due": 1, "2": 2, "4": 4, "8": 8}
"""Connections by name. "when due" announces no receive ahead."""
LAYERS = 4
WARM_UP = 3


class Setting:
    """A model of layers of `width`, trained by `recipe` over so many connections, on one rank."""

    def __init__(self, recipe: str, width: int, name: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        os.environ[CONNECTIONS] = str(SETTINGS[name])
        with mock.patch("gradwire._api.connections.LONG_S", math.inf if name == "when due" else LONG_S):
            self.wire = gradwire.attach(model, self.optimizer, recipe)
        self.model, self._width = model, width
        self._draw = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self.model(torch.randn(32, self._width, generator=self._draw)).square().mean().backward()
        self.optimizer.step()


def slowest(seconds: float) -> float:
    """The longest over ranks."""
    spent = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def worker(options: argparse.Namespace) -> None:
    """One rank: time all settings, and write what came of them on rank 0."""
    if options.window:
        cap(options.window)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = options.settings.split(";")
    settings = {name: Setting(options.recipe, options.width, name) for name in names}
    rows: dict[str, list[float]] = {name: [] for name in settings}
    for setting in settings.values():
        for _ in range(WARM_UP):
            setting.step()
    for number in range(options.rounds):
        for name, setting in mixed(list(settings.items()), number):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(options.steps):
                setting.step()
            rows[name].append(slowest(time.perf_counter() - start_s) / options.steps)
    first, *others = (list(each.model.parameters()) for each in settings.values())
    if not all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True)):
        raise RuntimeError("connections, or when receives are announced, have changed bits")
    del os.environ[CONNECTIONS]
    comm = ProcessGroupComm(borrow(dist.group.WORLD))
    dist.barrier()
    start_s = time.perf_counter()
    found = connect_more(comm, comm)
    measuring_s = slowest(time.perf_counter() - start_s)
    if dist.get_rank() == 0:
        told = {"step_s": rows, "found": str(found), "measuring_s": measuring_s}
        Path(options.out).write_text(json.dumps(told), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def cap(buffer_bytes: int) -> None:
    """Let no connection have larger buffers in this rank's namespace, and nowhere else."""
    if INTERFACE_VARIABLE not in os.environ:
        raise ValueError("--window needs a namespace for each rank, and there is none here: pass --window 0")
    for name in ("tcp_rmem", "tcp_wmem"):
        Path("/proc/sys/net/ipv4", name).write_text(f"4096 16384 {buffer_bytes}", encoding="ascii")


def show(told: dict[str, Any]) -> None:
    """A line for each setting, then what was chosen."""
    rows = told["step_s"]
    print(f"{'connections':<14}{'step ms':>9}  one over it, 95 %")
    for name, row in rows.items():
        found = paired(rows[ONE], row)
        print(f"{name:<14}{1e3 * median(row):>9.1f}  {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})")
    print(told["found"])
    print(f"to measure that took {told['measuring_s']:.3f} s")


def main() -> None:
    """Start ranks on the network, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", default="300mbit")
    parser.add_argument("--delay", default="25ms")
    parser.add_argument("--window", type=int, default=2**19)
    parser.add_argument("--recipe", default="dense")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--settings", default=";".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options)
        return
    told = told_by_ranks(options.workers, options.rate, options.delay)
    show(told)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
