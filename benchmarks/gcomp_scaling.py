"""What does GComp's ring do to a step on one to four workers: samples per second, CPU seconds, bytes, loss?

`gradwire bench` on a real model over a slow link, DistributedDataParallel beside it. All settings start from
equal weights and see equal batches, and near-lossless losses coincide with DDP's (the last columns), so that
the time to a fixed loss is that of the steps: "against DDP" is both. Where ranks share cores computation
slows down as well; `of bound` is the share of the same step's speed without communication.

Paper (GComp, section 7.3, figures 15 and 16): on four workers 53 and 107 % more samples per second.

    python benchmarks/gcomp_scaling.py [--workload chargpt] [--rate 50mbit] [--workers 1 2 3 4]
    [--pictures FOLDER] [--json PATH]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from curves import draw
from methods import bench

RECIPES = ("gcomp", "gcomp(mode='levels')", "gcomp(mode='lossless')", "dense")


def lines(world: int, document: dict[str, Any]) -> list[str]:
    """Of one world."""
    rows = document["rows"]
    plain = next(row["step_s"] for row in rows if row["name"] == "ddp")
    return [
        f"| {world} | `{row['name']}` | {row['step_s'] * 1e3:.0f} "
        f"| {samples_per_s(world, document, row):.1f} | {plain / row['step_s']:.2f}x | {row['scaling']:.1%} "
        f"| {row['interface_bytes_per_step'] / 1e6:.2f} | {row['cpu_s'] * 1e3:.0f} | {_loss(row)} |"
        for row in rows
        if row["step_s"] is not None
    ]


def samples_per_s(world: int, document: dict[str, Any], row: dict[str, Any]) -> float:
    """Of all ranks together."""
    return float(world * document["settings"]["workload_facts"]["batch_size"] / row["step_s"])


def picture(path: Path, documents: dict[int, dict[str, Any]]) -> None:
    """Samples per second over workers; no curve for a bound."""
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ddp", *RECIPES)}
    for world, document in documents.items():
        for row in document["rows"]:
            if row["name"] in curves and row["step_s"] is not None:
                curves[row["name"]].append((world, samples_per_s(world, document, row)))
    draw(path, {name: points for name, points in curves.items() if points}, "workers", "samples per second")


def _loss(row: dict[str, Any]) -> str:
    return "-" if row["loss"] is None else f"{row['loss']:.4f}"


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="chargpt")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", default="3")
    parser.add_argument("--rounds", default="7")
    parser.add_argument("--pictures", type=Path, help="folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    common = ["--workload", options.workload, "--rate", options.rate, "--peers", "ddp"]
    common += ["--recipes", ";".join(RECIPES), "--steps", options.steps, "--rounds", options.rounds]
    documents = {world: bench("--workers", str(world), *common) for world in options.workers}
    print(f"{options.workload}, {options.rate} per rank\n")
    print("| ranks | setting | step, ms | samples/s | against DDP | of bound | MB sent | CPU, ms | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for world, document in documents.items():
        print("\n".join(lines(world, document)))
    if options.pictures is not None:
        picture(options.pictures / f"gcomp-scaling-{options.workload}.svg", documents)
    if options.json is not None:
        options.json.write_text(json.dumps(documents, indent=1) + "\n")


if __name__ == "__main__":
    main()
