"""How much faster is a step of HSDP with int8 between nodes than native HSDP, over a slow link between nodes?

Two nodes of two ranks on an emulated network: a node's ranks share its link, and what they send each other
takes the loopback, which is not slowed. A stack of square matrices is trained on random numbers, each matrix
sharded by itself. Settings run in mixed order, round by round, in the same processes, native HSDP twice: the
ratio of the two says how far apart equal settings are. A step's time is the slowest rank's. Every round
checks that replicas are bit-identical. CPU seconds are of all ranks. Bytes are those that leave a node by its
interface, the mean of both nodes, beside what the cost model of `gradwire plan` says, which counts neither
headers nor the verdict.

Goal, at 200 Mbit/s: int8 is at least 2.5 times as fast as native HSDP. Bytes are within 1 % of the model's.

    python benchmarks/hsdp_step.py [--rate 200mbit] [--delay 0] [--rounds 7] [--steps 2] [--json PATH]
"""

import argparse
import json
import os
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from hsdp_loss import NATIVE, NODES, PER_NODE, Sharded
from ranks import timed_in_turns, told_by_ranks
from torch import nn

from gradwire.control.forecast import ClusterForecasts
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import BackwardTiming, Link
from gradwire.unit.parameters import ParameterSpec
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import paired

SETTINGS = {NATIVE: NATIVE, f"{NATIVE} again": NATIVE, "dense": "dense", "int8": "int8"}
GOAL, GOAL_OF = 2.5, "int8"
WIDTH, LAYERS = 768, 6
WARM_UP = 3


class Setting:
    """One way to train, on one rank."""

    def __init__(self, text: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
        self._whole = {name: each.shape for name, each in model.named_parameters()}
        self.sharded = Sharded(text, model, layers)
        self.optimizer = torch.optim.SGD(self.sharded.model.parameters(), lr=1e-3)
        self.sharded.attach(self.optimizer)
        self._draw = torch.Generator().manual_seed(dist.get_rank())

    def foreseen_bytes(self, text: str) -> float:
        """Bytes that a step sends over a node's link, by the cost model; two levels send what shards do."""
        specs = [
            ParameterSpec(name, tuple(shape), torch.float32, shape.numel())
            for name, shape in self._whole.items()
        ]
        numel = tuple(spec.numel for spec in specs)
        backward, free = BackwardTiming(0.0, (0.0,) * len(numel), numel, 0.0), Link(0.0, 0.0)
        cluster = Cluster(NODES * PER_NODE, free, per_node=PER_NODE, inside=free)
        return ClusterForecasts(specs, backward, cluster, two_levels=True).of_text(text).node_bytes

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        inputs = torch.randn(32, WIDTH, generator=self._draw)
        self.sharded.model(inputs).square().mean().backward()
        self.optimizer.step()

    def check(self) -> None:
        """Raise what is wrong with the sharded model by now."""
        self.sharded.check()


def worker(options: argparse.Namespace) -> None:
    """One rank: time all settings, and write what came of them on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    settings = {name: Setting(text) for name, text in SETTINGS.items()}
    rows = timed_in_turns(settings, options.rounds, options.steps, warm_up=WARM_UP)
    if dist.get_rank() == 0:
        for name, text in SETTINGS.items():
            if text != NATIVE:
                rows[name]["foreseen_bytes"] = [settings[name].foreseen_bytes(text)]
        Path(options.out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def show(rows: dict[str, dict[str, list[float]]]) -> None:
    """A line for each setting, then the goal."""
    print(f"{'between nodes':<20}{'step ms':>9}{'CPU ms':>9}{'node kB':>10}  native HSDP over it, 95 %")
    for name, row in rows.items():
        found = paired(rows[NATIVE]["step_s"], row["step_s"])
        times = f"{1e3 * median(row['step_s']):>9.1f}{1e3 * fmean(row['cpu_s']):>9.1f}"
        sent = fmean(row["bytes"])
        model = row.get("foreseen_bytes")
        beyond = f", bytes {sent / model[0] - 1:+.2%} of the model's" if model else ""
        ratio = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        print(f"{name:<20}{times}{sent / 1e3:>10.1f}  {ratio}{beyond}")
    reached = paired(rows[NATIVE]["step_s"], rows[GOAL_OF]["step_s"]).ratio
    print(f"{GOAL_OF}: {reached:.2f} times, goal {GOAL}: {'met' if reached >= GOAL else 'missed'}")


def main() -> None:
    """Start ranks on the network, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options)
        return
    rows = told_by_ranks(NODES * PER_NODE, options.rate, options.delay, NODES)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
