"""What do two levels save: two nodes of two or four ranks, beside the recipe flat in rank order, and DDP?

Ranks on an emulated network, of which those of a node share its link; what they send each other takes the
loopback, which is not slowed. A stack of square matrices is trained on random numbers.
Settings run in mixed order, round by round, in the same processes; a step's time is the slowest rank's. Bytes
are those that leave a node by its interface, the mean of both nodes, beside what the cost model of
`gradwire plan` says (`gradwire.control.forecast`). So are steps: the model gets the link as stated, the link
inside, the computation and the codecs as measured while all ranks are at it, and each rank's share of a core.
"spread" is half the range of a setting's rounds in parts of their median. Every round checks that replicas
are bit-identical.

Goal, with two ranks on a node: two levels send at most 0.68 of flat's bytes for dense, 0.60 for int8, and
0.36 for what is gathered, and int8 at most 0.18 of what DDP sends in float32; with four, 0.36 for int8, and
0.16 of DDP. Bytes are within 1 % of the model's, and steps at 200 Mbit/s within 10 % of the predicted, beyond
the spread. The model counts neither headers nor the verdict's bytes.

    python benchmarks/hierarchy.py [--per-node 2] [--layers 6] [--rate 200mbit] [--rounds 5] [--json PATH]
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from ranks import told_by_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.control.forecast import ClusterForecasts
from gradwire.measure.codec import measure_codec
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import BackwardTiming, Cores, Link
from gradwire.planning.step_time import Forecast
from gradwire.recipes import recipe
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import mixed

NODES = 2
DDP = "DDP"
RECIPES = ("dense", "int8", "topk(ratio=0.01)")
GOALS = {2: {"dense": 0.68, "int8": 0.60, "topk(ratio=0.01)": 0.36}, 4: {"int8": 0.36}}
"""For bytes as a share of flat's, by ranks on a node and recipe."""
GOALS_OF_DDP = {2: {"int8": 0.18}, 4: {"int8": 0.16}}
"""The same as a share of DDP's."""
WIDTH = 768


def ranks_of_nodes(per_node: int) -> list[list[int]]:
    """Node by node."""
    return [list(range(node * per_node, (node + 1) * per_node)) for node in range(NODES)]


class Setting:
    """One recipe on one or two levels, on one rank."""

    def __init__(self, text: str, nodes: list[list[int]] | None, depth: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(depth)]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        if text != DDP:
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
        found = ClusterForecasts(specs, backward, cluster, two_levels=two_levels).of(built, codec)
        share = len(os.sched_getaffinity(0)) / cluster.workers  # nodes are emulated: all share these cores
        return replace(found, cores=Cores(share, busy=1.0))


def inside_link(per_node: int, megabytes: int = 4, repetitions: int = 15) -> Link:
    """Between the ranks of a node, while all nodes use theirs.

    The median: where ranks share cores, gathers take up to five times the shortest one, and a step meets all.
    """
    groups = [dist.new_group(node) for node in ranks_of_nodes(per_node)]
    group, mine = groups[dist.get_rank() // per_node], torch.zeros(megabytes << 18)
    out = [torch.empty_like(mine) for _ in range(per_node)]
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_gather(out, mine, group=group)
        seconds.append(time.perf_counter() - start_s)
    return Link(0.0, median(seconds) / (mine.nbytes * (per_node - 1)))


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    per_node, workers = arguments.per_node, NODES * arguments.per_node
    levels = {"flat": None, "two levels": ranks_of_nodes(per_node)}
    recipes = arguments.recipes.split(";")
    wanted = {(text, level): nodes for text in recipes for level, nodes in levels.items()}
    wanted[DDP, "flat"] = None
    settings = {key: Setting(key[0], nodes, arguments.layers) for key, nodes in wanted.items()}
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
            sent = torch.tensor([(after - before).tx_bytes / arguments.steps / workers], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            dist.all_reduce(sent)
            rows[key]["step_s"].append(float(spent))
            rows[key]["bytes"].append(float(sent))
            setting.check()
    rate, delay_s = emulate.parse_rate(arguments.rate), emulate.parse_delay(arguments.delay)
    between = Link(delay_s, 8.0 / rate if rate else 0.0)
    cluster = Cluster(workers, between, per_node=per_node, inside=inside_link(per_node))
    backward = next(iter(settings.values())).computation()
    of_ddp = {"step_s": median(rows[DDP, "flat"]["step_s"]), "bytes": fmean(rows[DDP, "flat"]["bytes"])}
    ours = {key: setting for key, setting in settings.items() if key[0] != DDP}
    foreseen = {key: setting.foreseen(key[0], backward, cluster) for key, setting in ours.items()}
    if dist.get_rank() == 0:
        found = []
        for (text, level), setting in ours.items():
            report, model, row = setting.wire.report(), foreseen[text, level], rows[text, level]
            found.append(
                {
                    "recipe": text,
                    "levels": level,
                    "step_s": median(row["step_s"]),
                    "bytes": fmean(row["bytes"]),
                    "DDP": of_ddp,
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


def goal(share: float, goals: dict[str, float], recipe: str) -> str:
    """A share, and whether its goal is met, if there is one."""
    if recipe not in goals:
        return f"{share:.3f}"
    return f"{share:.3f} (goal {goals[recipe]}: {'met' if share <= goals[recipe] else 'missed'})"


def show(rows: list[dict[str, Any]], per_node: int) -> None:
    heads = ("step ms", "model ms", "spread", "node kB", "model kB", "memory kB")
    print(f"{'recipe':<18}{'levels':<12}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        seen = row["rounds"]["step_s"]
        spread = (max(seen) - min(seen)) / 2 / row["step_s"]
        kb = (row[name] / 1e3 for name in ("bytes", "foreseen_bytes", "memory_bytes"))
        times = f"{1e3 * row['step_s']:>11.1f}{1e3 * row['foreseen_s']:>11.1f}{spread:>11.0%}"
        print(f"{row['recipe']:<18}{row['levels']:<12}{times}" + "".join(f"{each:>11.1f}" for each in kb))
    ddp_ms, ddp_kb = 1e3 * rows[0]["DDP"]["step_s"], rows[0]["DDP"]["bytes"] / 1e3
    print(f"{DDP:<18}{'flat':<12}{ddp_ms:>11.1f}{'':>22}{ddp_kb:>11.1f}")
    for flat, two in zip(rows[::2], rows[1::2], strict=True):
        recipe = flat["recipe"]
        of_flat = goal(two["bytes"] / flat["bytes"], GOALS[per_node], recipe)
        of_ddp = goal(two["bytes"] / two["DDP"]["bytes"], GOALS_OF_DDP[per_node], recipe)
        faster, beyond = two["step_s"] / flat["step_s"], two["bytes"] / two["foreseen_bytes"] - 1
        print(f"{recipe:<18}bytes {of_flat} of flat, {of_ddp} of DDP, {beyond:+.2%} of the model's")
        print(f"{'':<18}step {faster:.3f} of flat's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-node", type=int, default=2, choices=sorted(GOALS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--recipes", default=";".join(RECIPES))
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
    rows = told_by_ranks(NODES * arguments.per_node, arguments.rate, arguments.delay, NODES)
    show(rows, arguments.per_node)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
