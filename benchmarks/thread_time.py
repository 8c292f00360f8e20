"""Which thread spends the processor time of a step of a small model, and what does gradwire add to it?

Ranks that share this machine's cores train a small convolutional network over loopback, one setting after the
other and in turns: plain DDP, torch's `fp16` hook, and recipes. A step's time is rank 0's mean over many
steps; its processor time is the kernel's account of each thread. Threads of gloo run messages, the thread
"gradwire" runs codecs and calls of collectives, and the main one runs the model and the hooks.

    python benchmarks/thread_time.py [--workers 4] [--rounds 3] [--steps 300] [--settings "ddp;dense;int8"]
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire

SETTINGS = "ddp;fp16_hook;dense;fp16;int8;int8(collective='all_gather');topk(ratio=0.01)"
WARM_UP, BATCH = 60, 2
Spent = dict[str, float]


def model() -> nn.Module:
    """81,000 parameters, which DDP hands over in one bucket."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 100), nn.Linear(100, 10)]
    return nn.Sequential(*layers)


def spent_s() -> Spent:
    """Processor time of this process so far, by thread: the main one, gradwire's, and gloo's together."""
    found: Spent = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # it has ended
            continue
        is_main = int(task.name) == os.getpid()
        found["main" if is_main else "gloo" if "gloo" in name else "gradwire"] += nanoseconds / 1e9
    return found


def rank_main(rank: int, workers: int, store: str, setting: str, steps: int, told: Any) -> None:
    """Train; rank 0 tells seconds per step, all in all and by thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    if setting == "fp16_hook":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif setting != "ddp":
        gradwire.attach(ddp, optimizer, setting)
    inputs, targets = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()

    train(WARM_UP)
    dist.barrier()
    before, start_s = spent_s(), time.perf_counter()
    train(steps)
    took_s, after = time.perf_counter() - start_s, spent_s()
    if rank == 0:
        told.put({"step": took_s / steps} | {name: (after[name] - before[name]) / steps for name in after})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print a table in milliseconds: mean, and the range over rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--settings", default=SETTINGS)
    options = parser.parse_args()
    found: dict[str, list[Spent]] = {}
    context = mp.get_context("spawn")
    for _ in range(options.rounds):
        for setting in options.settings.split(";"):
            told = context.SimpleQueue()
            with tempfile.TemporaryDirectory() as folder:
                given = (options.workers, f"{folder}/store", setting, options.steps, told)
                mp.spawn(rank_main, given, nprocs=options.workers)
            found.setdefault(setting, []).append(told.get())
    print("| setting | step, ms | processor time | main thread | gradwire | gloo |")
    print("|---|---|---|---|---|---|")
    for setting, rounds in found.items():
        spent = [sum(each.values()) - each["step"] for each in rounds]
        by_thread = [[each.get(name, 0.0) for each in rounds] for name in ("main", "gradwire", "gloo")]
        columns = [[each["step"] for each in rounds], spent, *by_thread]
        print(f"| `{setting}` | {' | '.join(map(_text, columns))} |")


def _text(seconds: list[float]) -> str:
    low, high = (f"{1e3 * each:.1f}" for each in (min(seconds), max(seconds)))
    return f"{1e3 * fmean(seconds):.1f} ({low} to {high})"


if __name__ == "__main__":
    main()
