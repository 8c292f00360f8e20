"""What do two levels save: two nodes of two ranks, beside the same recipe flat in rank order?

Four ranks on an emulated network, of which two share a node and its link; what a node's ranks send each other
takes the loopback, which is not slowed. A stack of square matrices is trained on random numbers.
Settings run in mixed order, round by round, in the same processes; a step's time is the slowest rank's. Bytes
are those that leave a node by its interface, the mean of both nodes, beside what the cost model of
`gradwire plan` says (`gradwire.control.forecast`). So are steps: the model gets the link as stated, the link
inside, the computation and the codecs as measured while all ranks are at it. "spread" is half the range of a
setting's rounds in parts of their median. Every round checks that replicas are bit-identical.

Goal, at 200 Mbit/s: two levels send at most 0.68 of flat's bytes for dense, 0.60 for int8, and 0.36 for what
is gathered; bytes equal the model's, and steps are within 10 % of the predicted, beyond the spread. The
model counts neither headers (about 1 %) nor the verdict's bytes.

    python benchmarks/hierarchy.py [--rate 200mbit] [--rounds 5] [--steps 3] [--json PATH]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.control.forecast import forecast
from gradwire.lab import emulate
from gradwire.lab.bench.statistics import mixed
from gradwire.measure.codec import measure_codec
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import BackwardTiming, Link
from gradwire.planning.forecast import Forecast
from gradwire.recipes import recipe

WORKERS, NODES = 4, 2
RECIPES = {"dense": 0.68, "int8": 0.60, "topk(ratio=0.01)": 0.36}
"""With the goal for bytes."""
NODES_OF_RANKS = [[0, 1], [2, 3]]
LEVELS: dict[str, list[list[int]] | None] = {"flat": None, "two levels": NODES_OF_RANKS}
WIDTH, LAYERS = 768, 6


class Setting:
    """One recipe on one or two levels, on one rank."""

    def __init__(self, text: str, nodes: list[list[int]] | None) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.wire = gradwire.attach(self.ddp, self.optimizer, text, nodes=nodes)
        self.draw = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.randn(32, WIDTH, generator=self.draw)).square().mean().backward()
        self.optimizer.step()

    def check(self) -> None:
        """The same bits on all ranks."""
        flat = torch.cat([p.detach().view(-1) for p in self.ddp.parameters()]).view(torch.int32).long()
        ends = torch.stack([flat.sum(), -flat.sum()])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        assert ends[0] == -ends[1], "replicas differ"

    def computation(self, repetitions: int = 5) -> BackwardTiming:
        """Forward and update, then the backward pass, of which all layers take the same time; medians."""
        forward_s, backward_s = [], []
        for _ in range(repetitions):
            dist.barrier()
            start_s = time.perf_counter()
            with self.ddp.no_sync():
                loss = self.ddp(torch.randn(32, WIDTH, generator=self.draw)).square().mean()
                middle_s = time.perf_counter()
                loss.backward()
            stop_s = time.perf_counter()
            self.optimizer.step()
            forward_s.append(time.perf_counter() - stop_s + middle_s - start_s)
            backward_s.append(stop_s - middle_s)
        numel = tuple(spec.numel for spec in self.wire.attached.source.specs)
        total_s = median(backward_s)
        ready_s = tuple(total_s * (place + 1) / len(numel) for place in range(len(numel)))
        return BackwardTiming(median(forward_s), ready_s, numel, total_s)

    def foreseen(self, text: str, backward: BackwardTiming, cluster: Cluster) -> Forecast:
        """What the cost model says."""
        specs, built = self.wire.attached.source.specs, recipe(text).build()
        codec = None if built.exchange.memory is None else measure_codec(built.exchange).cost
        two_levels = self.wire.report().per_node > 1
        return forecast(built, specs, backward, cluster, codec, two_levels=two_levels)


def inside_link(megabytes: int = 4, repetitions: int = 5) -> Link:
    """Between the ranks of a node, while all nodes use theirs; the shortest of a few gathers."""
    groups = [dist.new_group(node) for node in NODES_OF_RANKS]
    group, mine = groups[dist.get_rank() // (WORKERS // NODES)], torch.zeros(megabytes << 18)
    out = [torch.empty_like(mine) for _ in range(WORKERS // NODES)]
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_gather(out, mine, group=group)
        seconds.append(time.perf_counter() - start_s)
    return Link(0.0, min(seconds) / (mine.nbytes * (WORKERS // NODES - 1)))


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    settings = {(text, level): Setting(text, nodes) for text in RECIPES for level, nodes in LEVELS.items()}
    rows: dict[tuple[str, str], dict[str, Any]] = {key: {"step_s": [], "bytes": []} for key in settings}
    for setting in settings.values():
        for _ in range(3):
            setting.step()
    for number in range(arguments.rounds):
        for key, setting in mixed(list(settings.items()), number):
            dist.barrier()
            before, start_s = emulate.counters(), time.perf_counter()
            for _ in range(arguments.steps):
                setting.step()
            spent = torch.tensor([(time.perf_counter() - start_s) / arguments.steps], dtype=torch.float64)
            dist.barrier()  # what is in the queue still has left by then
            after = emulate.counters()
            assert before is not None
            assert after is not None
            sent = torch.tensor([(after - before).tx_bytes / arguments.steps / WORKERS], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            dist.all_reduce(sent)
            rows[key]["step_s"].append(float(spent))
            rows[key]["bytes"].append(float(sent))
            setting.check()
    rate, delay_s = emulate.parse_rate(arguments.rate), emulate.parse_delay(arguments.delay)
    between = Link(delay_s, 8.0 / rate if rate else 0.0)
    cluster = Cluster(WORKERS, between, per_node=WORKERS // NODES, inside=inside_link())
    backward = next(iter(settings.values())).computation()
    foreseen = {key: setting.foreseen(key[0], backward, cluster) for key, setting in settings.items()}
    if dist.get_rank() == 0:
        found = []
        for (text, level), row in rows.items():
            report, model = settings[text, level].wire.report(), foreseen[text, level]
            found.append(
                {
                    "recipe": text,
                    "levels": level,
                    "step_s": median(row["step_s"]),
                    "bytes": fmean(row["bytes"]),
                    "foreseen_s": model.step_s(),
                    "foreseen_bytes": model.node_bytes,
                    "reported_bytes": report.wire_bytes_per_step * report.per_node,
                    "inside_bytes": report.inside_bytes_per_step,
                    "memory_bytes": report.memory_bytes,
                    "rounds": row,
                }
            )
        Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def show(rows: list[dict[str, Any]]) -> None:
    heads = ("step ms", "model ms", "spread", "node kB", "model kB", "memory kB")
    print(f"{'recipe':<18}{'levels':<12}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        seen = row["rounds"]["step_s"]
        spread = (max(seen) - min(seen)) / 2 / row["step_s"]
        kb = (row[name] / 1e3 for name in ("bytes", "foreseen_bytes", "memory_bytes"))
        times = f"{1e3 * row['step_s']:>11.1f}{1e3 * row['foreseen_s']:>11.1f}{spread:>11.0%}"
        print(f"{row['recipe']:<18}{row['levels']:<12}{times}" + "".join(f"{each:>11.1f}" for each in kb))
    for flat, two in zip(rows[::2], rows[1::2], strict=True):
        share, goal = two["bytes"] / flat["bytes"], RECIPES[flat["recipe"]]
        verdict = "met" if share <= goal else "missed"
        faster = two["step_s"] / flat["step_s"]
        print(f"{flat['recipe']:<18}bytes {share:.3f} of flat (goal {goal}: {verdict}), step {faster:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out is not None:
        worker(arguments)
        return
    link = emulate.EmulatedLink(emulate.parse_rate(arguments.rate), emulate.parse_delay(arguments.delay))
    entered = emulate.enter("auto")
    with (
        tempfile.TemporaryDirectory() as folder,
        emulate.EmulatedNetwork(WORKERS, link, entered, NODES) as network,
    ):
        out = Path(folder, "rows.json")
        amount = ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        amount += ["--rate", arguments.rate, "--delay", arguments.delay]
        command = [sys.executable, __file__, "--out", str(out), *amount]
        ranks: list[subprocess.Popen[Any]] = [network.popen(rank, command) for rank in range(WORKERS)]
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), codes
        rows = json.loads(out.read_text(encoding="utf-8"))
    show(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
