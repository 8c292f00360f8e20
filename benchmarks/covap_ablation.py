"""What does each part of COVAP contribute? Interval, sharding, and the scheduler of error feedback.

Two parts. `time` runs `gradwire bench` on an emulated network over `--rate`: intervals 1 … 8, where the step
should stop shrinking at I = ⌈CCR⌉; and units as DDP has them (`off`), cut by the paper's rule (`paper`) and
balanced (`balanced`). `accuracy` trains `--workload` on 4 ranks, without a link, on which no loss depends:
intervals with the published schedule, and at I = 4 and 8 also with the whole residual from the first step on
(`full`) and without any (`none`), beside plain averages (`ddp`).

    python benchmarks/covap_ablation.py accuracy [--epochs 6] [--seeds 3] [--json PATH]
    python benchmarks/covap_ablation.py time [--rate 256mbit] [--rounds 7] [--json PATH]
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench import bench
from lockstep import Outcome, Setting, spread, train

from gradwire_lab.workloads import catalogue

WORLD = 4
INTERVALS = range(1, 9)
EMULATED = "emulated(vgg19, shrink=32)"
UNIT_MB = 25 / 32
"""DDP's and the paper's 25 MB, shrunk as the network is."""


def accuracy(options: argparse.Namespace) -> dict[str, Any]:
    """Final loss and test accuracy by setting."""
    work = catalogue.workload(options.workload, full=False)
    steps = options.epochs * work.describe()["train_examples"] // (WORLD * work.batch_size)
    texts = {"ddp": ""} | {f"I = {i}": f"covap(interval={i})" for i in options.intervals}
    for interval in [each for each in options.intervals if each in (4, 8)]:
        texts |= {
            f"I = {interval}, {kind}": f"covap(interval={interval}, feedback={kind!r})"
            for kind in ("full", "none")
        }
    print(f"{options.workload}, {WORLD} ranks, {steps} steps, {options.seeds} seeds\n")
    print("| setting | training loss | test loss | test accuracy, % |\n|---|---|---|---|")
    raw: dict[str, Any] = {}
    for name, text in texts.items():
        setting = Setting(options.workload, text, WORLD, work.batch_size, steps)
        outcomes = [train(setting, seed) for seed in range(options.seeds)]
        print(accuracy_line(name, outcomes), flush=True)
        raw[name] = {"setting": asdict(setting), "outcomes": [asdict(each) for each in outcomes]}
    return raw


def accuracy_line(name: str, outcomes: list[Outcome]) -> str:
    """Mean ± standard error over seeds."""
    figures = (
        spread([each.final_loss for each in outcomes]),
        spread([each.test["test_loss"] for each in outcomes]),
        spread([100 * each.test["test_accuracy"] for each in outcomes], 2),
    )
    return f"| {name} | " + " | ".join(figures) + " |"


def timing(options: argparse.Namespace) -> dict[str, Any]:
    """Step times by interval, then by sharding, in groups that fit into memory."""
    common = [
        "--workers",
        str(WORLD),
        "--rate",
        options.rate,
        "--steps",
        "2",
        "--rounds",
        str(options.rounds),
    ]
    common += ["--bucket-cap-mb", f"{UNIT_MB:.3f}", "--peers", "ddp", "--workload", EMULATED]
    raw = {}
    for title, texts in groups().items():
        raw[title] = document = bench("--recipes", ";".join(texts), *common)
        print(
            f"\n{title}, {EMULATED}, {WORLD} ranks, {options.rate}\n\n{time_table(document['rows'])}",
            flush=True,
        )
    return raw


def groups() -> dict[str, list[str]]:
    """Recipes that are measured side by side."""
    kinds = ("off", "paper", "balanced")
    low, high = INTERVALS[:4], INTERVALS[4:]
    return {
        "intervals up to 4": [f"covap(interval={interval})" for interval in low],
        "intervals from 5 on": [f"covap(interval={interval})" for interval in high],
        **{
            f"sharding at I = {interval}": [
                f"covap(interval={interval}, sharding={kind}, unit_mb={UNIT_MB:.3f})" for kind in kinds
            ]
            for interval in (2, 4)
        },
    }


def time_table(rows: list[dict[str, Any]]) -> str:
    """Against DDP, and against the step without communication."""
    plain = next(row["step_s"] for row in rows if row["name"] == "ddp")
    lines = [
        "| setting | step, ms | against ddp | share of linear, % | sent, MB | CPU, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["step_s"] is None:
            lines.append(f"| `{row['name']}` | {row['failed']} |" + " |" * 4)
            continue
        sent = "-" if row["wire_bytes_per_step"] is None else f"{row['wire_bytes_per_step'] / 1e6:.2f}"
        lines.append(
            f"| `{row['name']}` | {row['step_s'] * 1e3:.0f} | {plain / row['step_s']:.2f}x "
            f"| {row['scaling'] * 100:.1f} | {sent} | {row['cpu_s'] * 1e3:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["accuracy", "time"])
    parser.add_argument("--workload", default="convnet")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--intervals", type=int, nargs="+", default=INTERVALS[1:], help="of `accuracy`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="256mbit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw = accuracy(options) if options.part == "accuracy" else timing(options)
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
