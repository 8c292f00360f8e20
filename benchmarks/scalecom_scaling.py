"""Does ScaleCom keep the loss when batch and learning rate are scaled up by 8, and what does β do?

Chen et al. 2020, section 4 and figure 5: at the standard batch β = 1 is as good as no compression; with batch
and learning rate scaled up β = 1 degrades on large data, and β = 0.1 … 0.3 does not. Here on small data:
`--workload` on 2 ranks, and on 16 with 8 times the learning rate, over as many epochs. Rates per layer
follow from multiply-adds, and the first tenth of the steps is dense, as in the paper; the learning rate rises
over a twentieth of the steps, and starts from a quarter of the workload's own (`--base-lr`), because plain
averages still train at eight times that. Beside the loss, each the mean over the run: distance between the
ranks' memories (1 - cosine), Hamming distance of a rank's choice to the true top-k, overlap of their
histograms, and Spearman's correlation.

    python benchmarks/scalecom_scaling.py [--workload convnet] [--epochs 8] [--seeds 3] [--json PATH]
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lockstep import Outcome, Setting, spread, train

from gradwire.lab.workloads import catalogue
from gradwire.measure.uses import layer_rates

SCALES = (1, 8)
BETAS = (1.0, 0.3, 0.1)
BASE_WORLD = 2
FIGURES = ("memory_distance", "hamming", "histogram_overlap", "spearman", "contraction")


def settings(workload: str, epochs: int, scales: Sequence[int], base_lr: float) -> dict[str, Setting]:
    """Every method at every scale, by the name of its row; `base_lr` in the workload's own rates."""
    work = catalogue.workload(workload, full=False)
    model = work.model(0)
    batch = next(iter(work.batches(0, BASE_WORLD, 0)))
    rates = layer_rates(model, batch[0])
    examples = work.describe()["train_examples"]
    rows = {}
    for scale in scales:
        world = BASE_WORLD * scale
        steps = epochs * examples // (world * work.batch_size)
        base = Setting(workload, "", world, work.batch_size, steps, base_lr * scale, max(1, steps // 20))
        rows[f"x{scale}, dense"] = base
        for beta in BETAS:
            text = f"scalecom(rates={rates}, rate=400, beta={beta}, warmup_steps={steps // 10})"
            rows[f"x{scale}, β = {beta:g}"] = replace(base, text=text)
    return rows


def line(name: str, outcomes: list[Outcome]) -> str:
    """One row: means over seeds."""
    accuracy = [100 * each.test["test_accuracy"] for each in outcomes]
    cells = [name, spread([each.final_loss for each in outcomes]), spread(accuracy, 2)]
    late = [d for each in outcomes for d in each.diagnoses if d.hamming is not None]
    cells += [f"{fmean(getattr(d, field) for d in late):.3f}" if late else "-" for field in FIGURES]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| lr and batch, method | training loss | test accuracy, % | memories apart | Hamming "
    "| histogram overlap | Spearman | contraction |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", default="convnet")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--scales", type=int, nargs="+", default=SCALES)
    parser.add_argument("--base-lr", type=float, default=0.25, help="at scale 1, in the workload's own rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = settings(options.workload, options.epochs, options.scales, options.base_lr)
    print(f"{options.workload}, {options.epochs} epochs, {options.seeds} seeds\n\n{HEADER}")
    raw: dict[str, Any] = {}
    for name, setting in rows.items():
        outcomes = [train(setting, seed) for seed in range(options.seeds)]
        print(line(name, outcomes), flush=True)
        raw[name] = {"setting": asdict(setting), "outcomes": [asdict(each) for each in outcomes]}
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
