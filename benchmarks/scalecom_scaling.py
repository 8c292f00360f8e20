"""Does ScaleCom keep the loss when batch and learning rate are scaled up by 8, and what does β do?

Chen et al. 2020, section 4, tables 2 and 3, figures 4 and 5: at the standard batch β = 1 is as good as no
compression; with batch and learning rate scaled up β = 1 degrades on large data, and β = 0.1 … 0.3 does not.
Here on small data: `--workload` on `--ranks` ranks, and on `--scales` times as many with as many times the
learning rate, over as many epochs. Rates are by the paper's rule ("rule": per layer, from multiply-adds), or
one for all layers; the first tenth of the steps is dense, as in the paper. The learning rate rises over a
twentieth of the steps and falls to zero, and starts from `--base-lr` of the workload's own, which is as much
as plain averages still train at once it is scaled up.

Compression is the elements of all compressed layers over those that are sent of them. "Behind" is the mean
difference to plain averages of that scale, seed by seed. Beside the loss, each the mean over the run:
distance between the ranks' memories (1 - cosine), Hamming distance of a rank's choice to the true top-k,
overlap of their histograms, and Spearman's correlation. What is in the file of `--json` is not trained again.

    python benchmarks/scalecom_scaling.py [--workload convnet] [--epochs 8] [--seeds 3] [--json PATH]
        [--at-most TRAININGS] [--rates rule 100 400] [--betas 1 0.3 0.1] [--scales 1 8] [--ranks 2]
        [--batch 16] [--local]
"""

import argparse
import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lockstep import Outcome, Ranks, Setting, spread, train
from same_loss import gap

from gradwire.measure.uses import layer_rates
from gradwire.tools.diagnose import Diagnosis, selector_of
from gradwire.unit.context import ExchangeContext
from gradwire_lab.workloads import catalogue

SCALES = (1, 8)
BETAS = (1.0, 0.3, 0.1)
RULE = "rule"
FIGURES = ("memory_distance", "hamming", "histogram_overlap", "spearman", "contraction")


def settings(options: argparse.Namespace) -> dict[str, Setting]:
    """Every method at every scale, by the name of its row; plain averages of a scale come first."""
    work = catalogue.workload(options.workload, full=False, batch_size=options.batch)
    batch = next(iter(work.batches(0, options.ranks, 0)))
    by_rule = layer_rates(work.model(0), batch[0])
    examples = work.describe()["train_examples"]
    rows = {}
    for scale in options.scales:
        world = options.ranks * scale
        steps = int(options.epochs * examples) // (world * work.batch_size)
        lr_scale, looks = options.base_lr * scale, max(1, steps // 20)
        base = Setting(options.workload, "", world, work.batch_size, steps, lr_scale, looks)
        rows[f"x{scale}, dense"] = base
        for rate, beta in product(options.rates, options.betas):
            rates = f"rates={by_rule}, rate=400" if rate == RULE else f"rate={rate}"
            text = f"scalecom({rates}, beta={beta:g}, warmup_steps={steps // 10})"
            rows[f"x{scale}, {rate}, β = {beta:g}"] = replace(base, text=text)
        if options.local:
            for rate in [each for each in options.rates if each != RULE]:
                rows[f"x{scale}, {rate}, own top-k"] = replace(base, text=f"topk(ratio={1 / float(rate):g})")
    return rows


def compression(setting: Setting) -> float:
    """Elements of the layers that are compressed over those that are sent of them."""
    work = catalogue.workload(setting.workload, full=False)
    [flat_buffer] = Ranks(setting.text, work.model(0), 1).flat_buffers
    selector = selector_of(flat_buffer.exchange)
    assert selector is not None, setting.text
    ctxs = [ExchangeContext(setting.steps, unit.index, 0, 1, parts=unit.parts) for unit in flat_buffer.units]
    sent = sum(selector.count(unit.numel, ctx) for unit, ctx in zip(flat_buffer.units, ctxs, strict=True))
    return flat_buffer.numel / sent


def line(name: str, setting: Setting, outcomes: list[Outcome], dense: list[Outcome]) -> str:
    """One row: means over seeds."""
    percent = [100 * each.test["test_accuracy"] for each in outcomes if "test_accuracy" in each.test]
    held_out = spread(percent, 2) + " %" if percent else spread([each.test["test_loss"] for each in outcomes])
    mean, error = gap(outcomes, dense)
    cells = [name, f"{compression(setting):.0f}x" if setting.text else "-"]
    cells += [spread([each.final_loss for each in outcomes])]
    cells += [f"{mean:+.4f} ± {error:.4f}" if setting.text else "-", held_out]
    late = [d for each in outcomes for d in each.diagnoses if d.hamming is not None]
    cells += [f"{fmean(getattr(d, field) for d in late):.3f}" if late else "-" for field in FIGURES]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| lr and batch, method | compression | training loss | behind | on held-out data | memories apart "
    "| Hamming | histogram overlap | Spearman | contraction |\n|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", default="convnet")
    parser.add_argument("--epochs", type=float, default=8)
    parser.add_argument("--scales", type=int, nargs="+", default=SCALES)
    parser.add_argument("--rates", nargs="+", default=[RULE], help="'rule', or rates of all layers")
    parser.add_argument("--betas", type=float, nargs="+", default=BETAS)
    parser.add_argument("--local", action="store_true", help="every rank's own top-k, too, by topk")
    parser.add_argument("--ranks", type=int, default=2, help="at scale 1")
    parser.add_argument("--batch", type=int, help="samples per rank instead of the workload's own")
    parser.add_argument("--base-lr", type=float, default=0.25, help="at scale 1, in the workload's own rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--at-most", type=int, help="trainings in this call; the next one goes on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text(encoding="utf-8"))
    rows, trained = settings(options), 0
    for seed, (name, setting) in product(range(options.seeds), rows.items()):
        row = kept.setdefault(name, {"setting": asdict(setting), "outcomes": []})
        if row["setting"] != asdict(setting):
            raise SystemExit(f"{options.json} has other settings of {name!r}: {row['setting']}")
        if len(row["outcomes"]) > seed:
            continue
        if trained == options.at_most:
            return
        row["outcomes"].append(asdict(train(setting, seed)))
        trained += 1
        if options.json is not None:
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{options.workload}, {options.epochs:g} epochs, {options.seeds} seeds\n\n{HEADER}")
    dense: list[Outcome] = []
    for name, setting in rows.items():
        outcomes = [restored(each) for each in kept[name]["outcomes"]]
        dense = dense if setting.text else outcomes
        print(line(name, setting, outcomes, dense), flush=True)


def restored(kept: dict[str, Any]) -> Outcome:
    """An outcome from the file."""
    return Outcome(**{**kept, "diagnoses": [Diagnosis(**each) for each in kept["diagnoses"]]})


if __name__ == "__main__":
    main()
