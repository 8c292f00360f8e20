"""How long does AR-Topk's exchange take beside the authors' own, and how does it scale out?

The whole exchange of a fused gradient (choose, spread the places, take the values, sum them, put the mean)
on ranks of an emulated network whose link is the bottleneck. The peer is what the authors' code does: the
leader's places as int64 by a broadcast, then an all-reduce of float32 values, both the library's; it chooses
with our kernel and on the leader alone, so that only what travels differs. It stands there twice (A/A).
Beside it `star` with each way of spreading places and of summing values, `var`, ScaleCom's leader with its
chunk-wise choice, and top-k by all-gather.

The settings of a repetition run in mixed order on the same fresh normal numbers, between barriers; a time is
that of the slowest rank. Every repetition checks that the mean has the same bits on all ranks, that it is the
dense mean at the leader's largest elements and zero elsewhere, and that what is left is all the rest. Bytes
are those sent at the interfaces, by the busiest rank (whose link everybody waits for) and in the mean over
ranks, beside the mean that the rounds predict; `model` is the time that the wire alone should take.

Goal (c = 0.1, N = 4): at most 0.5 of the peer's time, stretch 0.35, and at most 0.4 of its bytes.

    python benchmarks/ar_topk.py [--workers 4] [--rate 200mbit] [--delay 0] [--repetitions 9] [--json PATH]
    python benchmarks/ar_topk.py --scale-out 2 3 4 5 6 7 8 --rate 200mbit --delay 5ms --sizes 4000000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.codec.select.rates import rated_top_k
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.comm import ProcessGroupComm
from gradwire.exchange.ar_topk import ar_topk
from gradwire.exchange.base import Exchange, run
from gradwire.exchange.leader import leader, leader_in_turn
from gradwire.exchange.payloads import gather
from gradwire.kernels.compiler import imported, prepare
from gradwire.kernels.places import put, take
from gradwire.kernels.topk import topk_indices
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import mixed, paired

PEER, AGAIN = "int64 broadcast", "int64 broadcast again"
GATHER = "topk, all-gather"
CHUNKS = "scalecom, chunk-wise"
F16 = torch.float16
HEADER = f"{'N':>2} {'setting':<24}{'median ms':>10}{'ratio':>7}{'95 % interval':>17}{'CPU ms':>8}"
HEADER += f"{'busiest kB':>11}{'ratio':>6}{'mean kB':>9}{'ratio':>6}{'predicted':>10}{'model ms':>9}"

Step = Callable[[Tensor, Tensor, ExchangeContext], float]
"""From x and mean (numel,) in place to the bytes that the rounds predict per rank."""


def settings(ratio: float) -> dict[str, Exchange]:
    """Everything beside the peer."""
    choice = top_k(ratio)
    return {
        "star": ar_topk(choice),
        "star, places by tree": ar_topk(choice, broadcast="library"),
        "star, places summed": leader(choice),
        "star, ring of ours": ar_topk(choice, algorithm="ring"),
        "star, tree": ar_topk(choice, algorithm="tree", broadcast="library"),
        "star, parameter server": ar_topk(choice, algorithm="star"),
        "star fp16": ar_topk(choice, dtype=F16),
        CHUNKS: leader(rated_top_k(round(1 / ratio), keep=1)),
        "var": ar_topk(choice, "variance"),
        GATHER: gather(sparse(choice)),
    }


def modelled_ms(name: str, world: int, payload: tuple[float, float], alpha_s: float, beta_s: float) -> float:
    """Latencies and bytes of each way, in the manner of the paper's equation 4, for what travels here."""
    places, values = payload
    depth, others = ceil(log2(world)), world - 1
    tree, ring = depth * alpha_s, 2 * others * alpha_s
    around = 2 * others / world * beta_s
    by_sum = ring + around * places
    spread = {"star, places summed": by_sum, CHUNKS: by_sum, "var": by_sum + others * alpha_s}
    scattered = world * alpha_s + around * places
    by_tree = tree + depth * places * beta_s
    summed = ring + around * values
    return 1e3 * {
        PEER: by_tree + summed,
        AGAIN: by_tree + summed,
        "star, places by tree": by_tree + summed,
        "star, tree": by_tree + 2 * tree + 2 * depth * values * beta_s,
        "star, parameter server": scattered + 2 * alpha_s + 2 * others * values * beta_s,
        GATHER: others * (alpha_s + (places + values) * beta_s),
    }.get(name, spread.get(name, scattered) + summed)


class Bench:
    """One rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(emulate.backend())
        self.arguments = arguments
        self.comm = ProcessGroupComm(dist.group.WORLD)
        self.steps: dict[str, Step] = {PEER: self.as_the_authors_do, AGAIN: self.as_the_authors_do}
        self.steps |= {name: self.by(exchange) for name, exchange in settings(arguments.ratio).items()}
        if arguments.only:
            self.steps = {name: self.steps[name] for name in (PEER, AGAIN, *arguments.only)}
        prepare(imported())

    def as_the_authors_do(self, x: Tensor, mean: Tensor, ctx: ExchangeContext) -> float:
        """Places as int64 from the leader, values as they are."""
        count, turn = round(self.arguments.ratio * x.numel()), ctx.step % ctx.world
        indices = topk_indices(x, count) if ctx.rank == turn else torch.empty(count, dtype=torch.int64)
        dist.broadcast(indices, turn)
        values = take(x, indices, 1.0 / ctx.world)
        dist.all_reduce(values)
        put(mean, indices, values)
        others = ctx.world - 1
        return float(others / ctx.world * indices.nbytes + 2 * others / ctx.world * values.nbytes)

    def by(self, exchange: Exchange) -> Step:
        """An exchange as it is."""

        def step(x: Tensor, mean: Tensor, ctx: ExchangeContext) -> float:
            metered = MeteredComm(self.comm)
            run(exchange, x, mean, metered, ctx)
            return metered.wire_bytes

        return step

    def timed(self, step: Step, x: Tensor, number: int) -> dict[str, float]:
        """One exchange, measured and checked; seconds of the slowest rank, CPU seconds of all."""
        left, mean = x.clone(), torch.zeros_like(x)
        ctx = ExchangeContext(number, 0, self.comm.rank, self.comm.world)
        dist.barrier()
        before, cpu_s, wall_s = emulate.counters(), time.process_time(), time.perf_counter()
        predicted = step(left, mean, ctx)
        spent = [time.perf_counter() - wall_s, time.process_time() - cpu_s]
        dist.barrier()
        after = emulate.counters()
        sent = float("nan") if before is None or after is None else float((after - before).tx_bytes)
        rows = [torch.zeros(3, dtype=torch.float64) for _ in range(self.comm.world)]
        dist.all_gather(rows, torch.tensor([*spent, sent], dtype=torch.float64))
        slowest_s, _, busiest = torch.stack(rows).max(0).values.tolist()
        _, cpu_s, total = torch.stack(rows).sum(0).tolist()
        self.check(x, left, mean, 1e-2 if step is self.steps.get("star fp16") else 1e-5)
        found = {"s": slowest_s, "cpu_s": cpu_s, "busiest_bytes": busiest}
        return found | {"mean_bytes": total / self.comm.world, "predicted_bytes": predicted}

    def check(self, x: Tensor, left: Tensor, mean: Tensor, tolerance: float) -> None:
        """The same bits everywhere, and nothing lost but what the sum rounds."""
        words = mean.view(torch.int32).long()
        extremes = torch.stack([words.sum(), (words * torch.arange(words.numel())).sum()])
        ends = torch.cat([extremes, -extremes])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        assert torch.equal(ends[:2], -ends[2:]), "ranks differ"
        balance = (x - left).div_(self.comm.world)
        dist.all_reduce(balance)
        # 8 ranks, numbers below 6: at most 8 roundings of 6/8 each, by 2^-24 or in 16 bits by 2^-11.
        assert (balance - mean).abs().max() <= tolerance, "something is lost"

    def check_choice(self, x: Tensor, mean: Tensor, turn: int) -> None:
        """The slow way: the leader's largest, densely averaged."""
        leaders = x.clone()
        dist.broadcast(leaders, turn)
        chosen = leaders.abs().topk(round(self.arguments.ratio * x.numel())).indices
        exact = x / self.comm.world
        dist.all_reduce(exact)
        expected = torch.zeros_like(x)
        expected[chosen] = exact[chosen]
        assert torch.allclose(mean, expected, atol=1e-5), "not the dense mean at the leader's places"

    def repetition(self, numel: int, number: int) -> dict[str, dict[str, float]]:
        """All settings once, on numbers of their own."""
        draw = torch.Generator().manual_seed(1000 * number + self.comm.rank)
        x = torch.randn(numel, generator=draw)
        steps = list(self.steps.items())
        for name, step in steps if number == 0 else ():
            if name not in ("var", "star fp16", CHUNKS, GATHER):
                mean = torch.zeros_like(x)
                step(x.clone(), mean, ExchangeContext(number, 0, self.comm.rank, self.comm.world))
                self.check_choice(x, mean, leader_in_turn(ExchangeContext(number, 0, 0, self.comm.world)))
        return {name: self.timed(step, x, number) for name, step in mixed(steps, number)}

    def measure(self, numel: int) -> dict[str, Any]:
        """All repetitions of a size, after one that nobody counts."""
        self.repetition(numel, 0)
        runs = [self.repetition(numel, number) for number in range(1, self.arguments.repetitions + 1)]
        rows: dict[str, Any] = {
            name: {key: [each[name][key] for each in runs] for key in runs[0][name]} for name in self.steps
        }
        for name, row in rows.items():
            ratio = paired(row["s"], rows[PEER]["s"])
            row["ratio"] = [ratio.ratio, ratio.low, ratio.high]
            for key in ("busiest_bytes", "mean_bytes"):
                row[f"{key}_ratio"] = fmean(row[key]) / fmean(rows[PEER][key])
            row["model_ms"] = self.model_ms(name, numel)
        return {"numel": numel, "world": self.comm.world, "rows": rows}

    def model_ms(self, name: str, numel: int) -> float:
        """What the wire alone should take."""
        link = emulate.parse_rate(self.arguments.rate)
        beta_s = 0.0 if link is None else 8.0 / link
        count = round(self.arguments.ratio * numel)
        *_, spread, values = leader(top_k(self.arguments.ratio)).rounds(
            numel, torch.float32, ExchangeContext(0, 0, 0, self.comm.world)
        )
        places = 8 * count if name in (PEER, AGAIN) else spread.payload_bytes
        size = values.payload_bytes // (2 if name.endswith("fp16") else 1)
        delay_s = emulate.parse_delay(self.arguments.delay)
        return modelled_ms(name, self.comm.world, (places, size), delay_s, beta_s)


def line(found: dict[str, Any], name: str) -> str:
    """A setting as text."""
    row = found["rows"][name]
    ratio, low, high = row["ratio"]
    text = f"{found['world']:>2} {name:<24}{1e3 * median(row['s']):>10.1f}{ratio:>7.3f}"
    text += f"{f'{low:.3f} … {high:.3f}':>17}{1e3 * median(row['cpu_s']):>8.0f}"
    for key in ("busiest_bytes", "mean_bytes"):
        text += f"{fmean(row[key]) / 1e3:>{11 if key.startswith('b') else 9}.0f}{row[f'{key}_ratio']:>6.2f}"
    return text + f"{fmean(row['predicted_bytes']) / 1e3:>10.0f}{row['model_ms']:>9.1f}"


def judge(found: list[dict[str, Any]]) -> None:
    """The goals, for the worst size."""
    for name in ("star", "star fp16", "var"):
        rows = [each["rows"][name] for each in found if name in each["rows"]]
        if not rows:
            continue
        time_ratio = max(row["ratio"][0] for row in rows)
        busiest, mean = (max(row[f"{k}_bytes_ratio"] for row in rows) for k in ("busiest", "mean"))
        print(f"{name}: time {time_ratio:.3f} (goal 0.5, stretch 0.35),", end=" ")
        print(f"bytes of the busiest rank {busiest:.3f}, in the mean {mean:.3f} (goal 0.4)")


def worker(arguments: argparse.Namespace) -> None:
    """One rank; rank 0 prints and writes."""
    bench, found = Bench(arguments), []
    if bench.comm.rank == 0 and not arguments.quiet_header:
        print(HEADER, flush=True)
    for numel in arguments.sizes:
        found.append(bench.measure(numel))
        if bench.comm.rank == 0:
            print(f"{numel:,} elements, c = {arguments.ratio}")
            for name in found[-1]["rows"]:
                print(line(found[-1], name), flush=True)
    if bench.comm.rank == 0:
        if bench.comm.world == 4:
            judge(found)
        if arguments.json:
            options = {key: getattr(arguments, key) for key in ("rate", "delay", "ratio")}
            arguments.json.write_text(json.dumps({**options, "sizes": found}, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def launch(arguments: argparse.Namespace, world: int, rest: list[str]) -> int:
    """The ranks of one network."""
    command = [sys.executable, "-m", "gradwire", "net", "run", "--workers", str(world)]
    command += ["--rate", arguments.rate, "--delay", arguments.delay, "--", sys.executable, __file__, *rest]
    return subprocess.run(command, check=False).returncode


def scale_out(arguments: argparse.Namespace) -> int:
    """One world after the other, and their documents in one."""
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        for world in arguments.scale_out:
            path = Path(folder) / f"{world}.json"
            code = launch(arguments, world, [*sys.argv[1:], "--json", str(path), "--quiet-header"])
            if code != 0:
                return code
            documents.append(json.loads(path.read_text()))
    if arguments.json:
        arguments.json.write_text(json.dumps(documents, indent=2) + "\n")
    return 0


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scale-out", type=int, nargs="+", metavar="N", help="worlds, one after the other")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4_000_000, 16_000_000])
    parser.add_argument("--only", nargs="+", help="settings beside the peer")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--quiet-header", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
    elif arguments.scale_out:
        print(HEADER, flush=True)
        raise SystemExit(scale_out(arguments))
    else:
        raise SystemExit(launch(arguments, arguments.workers, sys.argv[1:]))


if __name__ == "__main__":
    main()
