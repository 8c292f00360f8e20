"""What does COVAP's hook cost per step beside torch's PowerSGD (rank 1) and fp16 hooks, in CPU seconds?

Shapes of published networks, gradients drawn at random. CPU time is the process's with all its threads.

- `alone`: one rank in one process, so that nothing is transmitted: what a hook computes itself. From each
  setting's backward pass that of DDP without a hook is subtracted. Settings in turn, medians; `ddp again` is
  a second module without a hook, and its line the error of such a difference.
- `--workers N`: `gradwire bench` on N ranks without a link limit; transmission through the kernel included,
  of which COVAP has a quarter of DDP's, fp16 half and PowerSGD next to nothing. Less the step without
  communication (`bound`).

Goals: at most 0.25 of PowerSGD's, at most fp16's.

    python benchmarks/covap_hook_cost.py [--model resnet101] [--shrink 4] [--workers N] [--json PATH]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench import bench
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.workloads import catalogue

WARM_UP = 5
"""PowerSGD's dense start, DDP's rebuilt buckets, and caches."""
PEERS = "ddp;fp16_hook;powersgd_hook(bucket_cap_mb=1000)"
RECIPES = ("covap(interval=4)", "covap(interval=2)", "dense")


def _power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


INSTALL: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "ddp": lambda ddp: None,
    "ddp again": lambda ddp: None,
    "fp16_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "powersgd_hook": _power_sgd,
    **{text: lambda ddp, text=text: gradwire.attach(ddp, recipe=text) for text in RECIPES},
}


def alone(workload: str, rounds: int) -> dict[str, float]:
    """CPU seconds of a backward pass by setting."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work = catalogue.workload(workload)
    modules = {}
    for name, install in INSTALL.items():
        cap_mb = 1000 if name == "powersgd_hook" else None
        modules[name] = DistributedDataParallel(
            work.model(0), bucket_cap_mb=cap_mb, gradient_as_bucket_view=True
        )
        install(modules[name])
    batches, seconds = work.batches(0, 1, 0), {name: [] for name in INSTALL}
    for _ in range(WARM_UP + rounds):
        batch = next(batches)
        for name, module in modules.items():
            loss = work.loss(module, batch)
            start = time.process_time()
            loss.backward()
            seconds[name].append(time.process_time() - start)
            module.zero_grad(set_to_none=True)
    dist.destroy_process_group()
    return {name: median(each[WARM_UP:]) for name, each in seconds.items()}


def among(workers: int, workload: str, rounds: int) -> dict[str, float]:
    """CPU seconds of a rank's step by setting, the bounds among them."""
    document = bench(
        *("--workload", workload, "--workers", str(workers), "--rate", "unlimited"),
        *("--peers", PEERS, "--recipes", ";".join(RECIPES), "--steps", "4", "--rounds", str(rounds)),
    )
    return {row["name"]: row["cpu_s"] for row in document["rows"] if row["cpu_s"] is not None}


def table(seconds: dict[str, float], base: str) -> str:
    """Beyond `base`, and relative to the two hooks'."""
    cost = {name: each - seconds[base] for name, each in seconds.items()}
    fp16, power = (next(s for name, s in cost.items() if name.startswith(n)) for n in ("fp16", "powersgd"))
    lines = [
        f"| setting | CPU, ms | beyond `{base}`, ms | of PowerSGD's | of fp16's |",
        "|---|---|---|---|---|",
    ]
    for name, each in cost.items():
        lines.append(
            f"| `{name}` | {seconds[name] * 1e3:.1f} | {each * 1e3:.1f} "
            f"| {each / power:.2f}x | {each / fp16:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="resnet101")
    parser.add_argument("--shrink", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # A backward pass that does not sleep: nothing here depends on when gradients are ready.
    text = f"emulated({options.model}, shrink={options.shrink:g}, time_scale=0.001)"
    if options.workers == 1:
        seconds, base = alone(text, options.rounds), "ddp"
    else:
        seconds, base = among(options.workers, text, options.rounds), "bound"
    print(f"{text}, ranks: {options.workers}\n\n{table(seconds, base)}")
    if options.json is not None:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
