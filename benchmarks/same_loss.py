"""Do ScaleCom and AR-Topk train to the loss of plain averages, at their default ratios?

Real models, ranks in one process, from equal weights, over several seeds. Gap is the mean difference of
final losses (the last tenth of the steps), seed by seed, and how many of its own standard errors that is; a
gap within two, or below zero, counts as the same loss. top-k by all-gather stands beside them. Sent is what a
rank sends in a step, as announced, in the mean over the second half of the steps.

With `--recipes` it is other ones, each compared with the first ('' for plain averages). So for MergeComp's
claim, that grouping does not change the loss after equally many steps ({warm} is a tenth of the steps):

    python benchmarks/same_loss.py --recipes "mergecomp(inner='topk(ratio=0.01)', split='layers')" \\
        "mergecomp(inner='topk(ratio=0.01)', split='even', groups=1)" \\
        "mergecomp(inner='topk(ratio=0.01)', split='even', groups=2)"

    python benchmarks/same_loss.py [--workloads convnet chargpt] [--seeds 3] [--steps N] [--json PATH]
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from lockstep import Outcome, Setting, spread, train

WORKLOADS = {"convnet": (4, 16, 750), "chargpt": (2, 6, 250), "resnet_demo": (4, 16, 375)}
"""Ranks, samples per rank, steps."""
RECIPES = ("", "star_topk", "var_topk", "scalecom(warmup_steps={warm})", "topk")
"""The first is plain averages; ScaleCom's dense start is a tenth of the steps."""


def gap(outcomes: Sequence[Outcome], first: Sequence[Outcome]) -> tuple[float, float]:
    """Of final losses: mean, and standard error over seeds."""
    apart = [one.final_loss - other.final_loss for one, other in zip(outcomes, first, strict=True)]
    return fmean(apart), stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")


def line(workload: str, text: str, outcomes: Sequence[Outcome], first: Sequence[Outcome]) -> str:
    """One line of the table."""
    metric = "test_accuracy" if "test_accuracy" in outcomes[0].test else "test_loss"
    mean, error = gap(outcomes, first)
    same = "-" if outcomes is first or len(outcomes) < 2 else "yes" if mean <= 2 * error else "no"
    apart = "-" if outcomes is first else f"{mean:+.4f} ± {error:.4f}"
    losses, tests = [each.final_loss for each in outcomes], [each.test[metric] for each in outcomes]
    name = f"`{text}`" if text else "plain averages"
    sent = fmean(each.sent_bytes for each in outcomes) / 1e3
    shown = f"{spread(losses)} | {apart} | {same} | {metric} {spread(tests)} | {sent:.1f}"
    return f"| {workload} | {name} | {shown} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["convnet", "chargpt"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="the first is the yardstick")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="fewer or more than is usual for the model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | gradients by | loss | gap | same | on held-out data | sent, kB |")
    print("|---|---|---|---|---|---|---|")
    raw: dict[str, Any] = {}
    for workload in options.workloads:
        world, batch, usual = WORKLOADS[workload]
        steps = options.steps or usual
        first: list[Outcome] = []
        for recipe in options.recipes:
            text = recipe.replace("{warm}", str(steps // 10))
            setting = Setting(workload, text, world, batch, steps)
            outcomes = [train(setting, seed) for seed in range(options.seeds)]
            first = first or outcomes
            print(line(workload, text, outcomes, first), flush=True)
            raw[f"{workload} {text}"] = [asdict(each) for each in outcomes]
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
