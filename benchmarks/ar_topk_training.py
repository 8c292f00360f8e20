"""What do STAR, VAR and a choice between them cost in accuracy, beside top-k by layer and MSTopk?

The convolutional network on Fashion-MNIST, at ratios of 0.1, 0.01 and 0.001, on shards that are alike and on
shards sorted by label, from equal weights, over several seeds. Two parts, because loss over steps does not
depend on the link:

- training on an unshaped network: accuracy on held-out images, the last losses, who led how often, and the
  gain over steps, the share of ‖x‖² that a rank sends of its error-fed gradient x, in the mean over ranks;
- step times on a slow link, settings in mixed order, medians over rounds; `dense again` is the A/A spread.

Another network has more matrices, as the paper's tables IV and V have: `--workload resnet_demo --batch 8`.

    python benchmarks/ar_topk_training.py REPORT.md [--workers 4] [--steps 400] [--seeds 3] [--json PATH]
        [--methods star_topk var_topk lwtopk] [--shards iid]
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import correlation, fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Comm
from gradwire.exchange.base import Decode, Exchange
from gradwire.kernels.compiler import imported, prepare
from gradwire.unit.context import ExchangeContext
from gradwire_lab import emulate
from gradwire_lab.bench.settings import TrainingTask, parse_entry
from gradwire_lab.bench.statistics import mixed, paired
from gradwire_lab.bench.trainer import Trainer, build

METHODS = {
    "star_topk": "",
    "var_topk": "",
    "ar_topk": "",
    "lwtopk": ", layers=True",
    "mstopk": ", fused=True",
}
"""Ranges of a choice as in the paper: by layer, or the whole gradient."""
RATIOS = (0.1, 0.01, 0.001)
SHARDS = ("iid", "skewed")
DENSE, AGAIN = "dense", "dense again"
LAST = 20
"""So many steps at the end make up the last loss."""

Row = dict[str, Any]


class Watched:
    """An exchange whose share of sent energy is noted, step by step, over all units."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner
        self.energy: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """See `Exchange.start`."""
        came = _energy(x)
        finish = self._inner.start(x, mean, comm, ctx)

        def finished() -> None:
            finish()
            noted = self.energy.setdefault(ctx.step, [0.0, 0.0])
            noted[0] += came - _energy(x)
            noted[1] += came

        return finished

    def gains(self) -> list[float]:
        """By step."""
        return [sent / came if came else 1.0 for _step, (sent, came) in sorted(self.energy.items())]


def _energy(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x).double().square())


def watch(trainer: Trainer) -> Watched | None:
    """Look over the shoulder of what remembers, if there is such a flat buffer."""
    assert trainer.wire is not None
    reducer = trainer.wire.attached.reducer
    for flat_buffer, plans in zip(reducer.layout.flat_buffers, reducer._plans, strict=True):
        flat_buffer.exchange = watched = Watched(flat_buffer.exchange)
        plans[:] = [replace(plan, exchange=watched) for plan in plans]  # which had the exchange from before
        return watched
    return None


def mean_over_ranks(values: list[float]) -> list[float]:
    """Of as many values on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def train(recipe: str, shards: str, seed: int, arguments: argparse.Namespace) -> Row:
    """One run; the same on all ranks but for the accuracy, which rank 0 finds."""
    task = TrainingTask(
        arguments.workload, shards=shards, batch_size=arguments.batch, decay_steps=arguments.steps
    )
    trainer = build(parse_entry(recipe, "recipe"), task, seed)
    watched = watch(trainer)
    losses = mean_over_ranks([trainer.step().loss for _ in range(arguments.steps)])
    assert len(set(gathered(trainer.fingerprint()))) == 1, f"{recipe}: replicas differ"
    trainer.model.eval()
    with torch.no_grad():
        accuracy = trainer.workload.evaluate(trainer.model)["test_accuracy"] if dist.get_rank() == 0 else 0.0
    gains = mean_over_ranks(watched.gains()) if watched is not None else []
    report = trainer.report()
    assert report is not None
    row = {"recipe": recipe, "shards": shards, "seed": seed, "accuracy": accuracy}
    row |= {"loss": fmean(losses[-LAST:]), "times_led": report["times_led"], "gains": gains}
    return row | {"sent_bytes": report["metered_bytes_per_step"]}


def gathered(value: str) -> list[str]:
    """By rank."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def recipes(methods: Iterable[str]) -> list[str]:
    """All settings."""
    return [
        DENSE,
        *(f"{method}(ratio={ratio}{METHODS[method]})" for method, ratio in product(methods, RATIOS)),
    ]


def time_steps(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """By setting and round, milliseconds of a step of the slowest rank (median of its steps)."""
    task = TrainingTask(arguments.workload, batch_size=arguments.batch)
    names = [*recipes(arguments.methods), AGAIN]
    trainers = {name: build(parse_entry(name.removesuffix(" again"), "recipe"), task, 0) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds + 1):
        for name in mixed(names, number):
            dist.barrier()
            steps = torch.tensor([trainers[name].step().step_s for _ in range(arguments.timed)])
            dist.all_reduce(steps, dist.ReduceOp.MAX)
            if number > 0:  # the first round warms up
                found[name].append(1e3 * float(steps.median()))
    return found


def worker(arguments: argparse.Namespace) -> None:
    """One rank of one part; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    prepare(imported())
    found: Any = []
    if arguments.part == "time":
        found = time_steps(arguments)
    else:
        settings = product(arguments.shards, range(arguments.seeds), recipes(arguments.methods))
        for shards, seed, recipe in settings:
            found.append(train(recipe, shards, seed, arguments))
            if dist.get_rank() == 0:
                print(shards, seed, recipe, f"{found[-1]['accuracy']:.3f}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        arguments.part_json.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def with_error(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean ± standard error."""
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{scale * fmean(values):.{digits}f} ± {scale * error:.{digits}f}"


def led(rows: list[Row]) -> str:
    """Shares of steps by rank over all seeds."""
    counts = [row["times_led"] for row in rows if row["times_led"] is not None]
    if not counts:
        return "-"
    sums = [sum(column) for column in zip(*counts, strict=True)]
    return " ".join(f"{100 * each / sum(sums):.0f}" for each in sums)


def gain_at(rows: list[Row]) -> tuple[list[float], float]:
    """Mean gains over the first, a middle and the last tenth of the steps, and over all."""
    gains = [fmean(column) for column in zip(*(row["gains"] for row in rows), strict=True)]
    tenth = max(1, len(gains) // 10)
    middle = len(gains) // 2
    return [fmean(gains[:tenth]), fmean(gains[middle : middle + tenth]), fmean(gains[-tenth:])], fmean(gains)


def table(rows: list[Row], shards: str, times: dict[str, list[float]]) -> str:
    """One line per setting."""
    lines = [
        "| setting | step, ms | sent, kB | accuracy, % | against dense | last loss "
        "| gain: first, middle, last tenth | led, % of steps by rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    of: dict[str, list[Row]] = {}
    for row in rows:
        if row["shards"] == shards:
            of.setdefault(row["recipe"], []).append(row)
    dense = fmean(row["accuracy"] for row in of[DENSE])
    for name, found in of.items():
        accuracies = [row["accuracy"] for row in found]
        parts = " ".join(f"{value:.2f}" for value in gain_at(found)[0]) if found[0]["gains"] else "-"
        cells = [
            f"`{name}`",
            f"{median(times[name]):.0f}",
            f"{fmean(r['sent_bytes'] for r in found) / 1e3:.1f}",
        ]
        cells += [with_error(accuracies, 100), f"{100 * (fmean(accuracies) - dense):+.1f}"]
        cells += [with_error([row["loss"] for row in found], digits=3), parts, led(found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def correlations(rows: list[Row]) -> str:
    """Of mean gain with accuracy, over settings."""
    told = []
    for shards in dict.fromkeys(row["shards"] for row in rows):
        points = [
            (gain_at(found)[1], fmean(row["accuracy"] for row in found))
            for name in dict.fromkeys(row["recipe"] for row in rows)
            if name != DENSE and (found := [r for r in rows if r["shards"] == shards and r["recipe"] == name])
        ]
        gains, accuracies = zip(*points, strict=True)
        alike = len(set(gains)) == 1 or len(set(accuracies)) == 1
        told.append(f"{'none' if alike else f'{correlation(gains, accuracies):.2f}'} on {shards} shards")
    return ", ".join(told)


def differences(rows: list[Row]) -> str:
    """Of accuracy, of the other methods to STAR, paired by seed."""
    accuracy = {(r["shards"], r["recipe"], r["seed"]): r["accuracy"] for r in rows}
    seeds = sorted({row["seed"] for row in rows})
    others = [m for m in METHODS if m != "star_topk" and any(r["recipe"].startswith(f"{m}(") for r in rows)]
    lines = [
        f"| shards | c | {' | '.join(f'{other} - star_topk, points' for other in others)} |",
        "|---|---" + "|---" * len(others) + "|",
    ]
    for shards, ratio in product(dict.fromkeys(row["shards"] for row in rows), RATIOS):
        cells = [
            with_error(
                [
                    accuracy[shards, f"{other}(ratio={ratio}{METHODS[other]})", seed]
                    - accuracy[shards, f"star_topk(ratio={ratio})", seed]
                    for seed in seeds
                ],
                100,
            )
            for other in others
        ]
        lines.append(f"| {shards} | {ratio} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(rows: list[Row], times: dict[str, list[float]], arguments: argparse.Namespace) -> str:
    """The document."""
    again = paired(times[AGAIN], times[DENSE])
    images = f" of {arguments.batch} images" if arguments.batch else ""
    parts = [
        f"# AR-Topk in training, {datetime.date.today()}",
        f"`benchmarks/ar_topk_training.py`: {arguments.workload} on Fashion-MNIST (vendored slice), "
        f"{arguments.workers} ranks{images}, {arguments.steps} steps, {arguments.seeds} seeds "
        f"(mean ± standard error). Steps are timed at {arguments.rate} per rank, {arguments.rounds} rounds "
        f"of {arguments.timed} steps in mixed order; dense against itself "
        f"{again.low:.2f} … {again.high:.2f}. "
        "Bytes are per rank and step. "
        "Gain is the share of ‖x‖² that is sent of the error-fed gradient x, in the mean over ranks.",
        f"Correlation of mean gain with accuracy over the settings: {correlations(rows)}.",
        *(f"## {shards} shards\n\n{table(rows, shards, times)}" for shards in arguments.shards),
        f"## Beside STAR\n\n{differences(rows)}",
    ]
    return "\n\n".join(parts) + "\n"


def launch(arguments: argparse.Namespace, part: str, rate: str, path: Path) -> Any:
    """One part on ranks of its own."""
    command = [sys.executable, "-m", "gradwire", "net", "run", "--workers", str(arguments.workers)]
    command += ["--rate", rate, "--", sys.executable, __file__, *sys.argv[1:]]
    subprocess.run([*command, "--part", part, "--part-json", str(path)], check=True)
    return json.loads(path.read_text())


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--workload", default="convnet")
    parser.add_argument("--batch", type=int, help="samples per rank instead of the workload's own")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--shards", nargs="+", choices=SHARDS, default=list(SHARDS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="20mbit", help="of the link on which steps are timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timed", type=int, default=3, help="steps of a setting in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=("train", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--part-json", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = launch(arguments, "train", "unlimited", Path(folder) / "rows.json")
        times = launch(arguments, "time", arguments.rate, Path(folder) / "times.json")
    arguments.report.write_text(report(rows, times, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": rows, "step_ms": times}) + "\n")


if __name__ == "__main__":
    main()
