"""What does GComp's ring do to a step on one to four workers: samples per second, CPU seconds, bytes, loss?

`gradwire bench` on a real model over a slow link, DistributedDataParallel beside it. All settings start from
equal weights and see equal batches, and near-lossless losses coincide with DDP's (the last columns), so that
the time to a fixed loss is that of the steps: "against DDP" is both. Where ranks share cores computation
slows down as well; `of bound` is the share of the same step's speed without communication. One worker has
nobody to exchange with: it trains here, on one thread as the others, and is where all curves of the picture
begin.

Paper (GComp, section 7.5, figures 15 and 16): on four workers 53 and 107 % more samples per second.

    python benchmarks/gcomp_scaling.py [--workload chargpt] [--rate 50mbit] [--workers 1 2 3 4]
    [--pictures FOLDER] [--json PATH]
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from curves import draw
from methods import bench

from gradwire.lab.workloads import catalogue

RECIPES = ("gcomp", "gcomp(mode='levels')", "gcomp(mode='lossless')", "dense")


ALONE = "one worker"
WARM_UP = 3
"""Steps of one worker that do not count."""


def alone(text: str, steps: int) -> dict[str, Any]:
    """As a document of `gradwire bench`, with one row."""
    torch.set_num_threads(1)
    workload = catalogue.workload(text)
    model = workload.model(seed=0)
    optimizer, batches = workload.optimizer(model.parameters()), workload.batches(0, 1, seed=0)
    wall_s, cpu_s = [], []
    for _ in range(WARM_UP + steps):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        workload.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wall_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.process_time() - start_cpu_s)
    row = {
        "name": ALONE,
        "step_s": median(wall_s[WARM_UP:]),
        "cpu_s": median(cpu_s[WARM_UP:]),
        "scaling": 1.0,
    }
    row |= {"interface_bytes_per_step": 0, "loss": None}
    return {"rows": [row], "settings": {"workload_facts": {"batch_size": workload.batch_size}}}


def lines(world: int, document: dict[str, Any]) -> list[str]:
    """Of one world."""
    rows = document["rows"]
    plain = next((row["step_s"] for row in rows if row["name"] == "ddp"), None)
    return [
        f"| {world} | `{row['name']}` | {row['step_s'] * 1e3:.0f} "
        f"| {samples_per_s(world, document, row):.1f} | {against(plain, row)} | {row['scaling']:.1%} "
        f"| {row['interface_bytes_per_step'] / 1e6:.2f} | {row['cpu_s'] * 1e3:.0f} | {_loss(row)} |"
        for row in rows
        if row["step_s"] is not None
    ]


def against(plain_s: float | None, row: dict[str, Any]) -> str:
    """How many times as fast as DDP."""
    return "-" if plain_s is None else f"{plain_s / row['step_s']:.2f}x"


def samples_per_s(world: int, document: dict[str, Any], row: dict[str, Any]) -> float:
    """Of all ranks together."""
    return float(world * document["settings"]["workload_facts"]["batch_size"] / row["step_s"])


def picture(path: Path, documents: dict[int, dict[str, Any]]) -> None:
    """Samples per second over workers; no curve for a bound."""
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ddp", *RECIPES)}
    for world, document in documents.items():
        for row in document["rows"]:
            if row["step_s"] is not None:
                for name in curves if row["name"] == ALONE else {row["name"]} & curves.keys():
                    curves[name].append((world, samples_per_s(world, document, row)))
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
    documents = {
        world: bench("--workers", str(world), *common)
        if world > 1
        else alone(options.workload, int(options.steps) * int(options.rounds))
        for world in options.workers
    }
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
