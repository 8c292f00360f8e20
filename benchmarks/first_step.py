"""How long training waits for its first step where no kernel is compiled: `python -m benchmarks.first_step`.

Two ranks on this machine, over loopback, each recipe with an empty cache, and once more with what is in it
then. For rank 0: seconds in `attach`, in the first step after it, and in the longest step; the mean of the
steps until the recipe runs, or `auto` measures, beside that of DDP's steps before `attach`; and the step in
which that is. With `--compile-first`, `attach` compiles, as GRADWIRE_COMPILE_FIRST=1 asks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

RECIPES = ("int8", "int4", "topk(ratio=0.01)", "powersgd", "gcomp", "auto")
WIDTH = 512
PLAIN = 100
MOST_S = 240.0


def trained(recipe: str) -> dict[str, float]:
    """On one rank: attach, and train until the recipe runs or measures."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs, took_s = torch.randn(32, WIDTH), []

    def step() -> None:
        start_s = time.perf_counter()
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        took_s.append(time.perf_counter() - start_s)
        time.sleep(0.02)  # in which a real model would compute, on another device

    for _ in range(PLAIN):
        step()
    plain_s = statistics.mean(took_s[PLAIN // 2 :])
    took_s.clear()
    dist.barrier()
    begun_s = time.perf_counter()
    wire = gradwire.attach(ddp, optimizer, recipe)
    attach_s = time.perf_counter() - begun_s
    reducer = wire.attached.backward.reducer
    step()
    while reducer.awaits_kernels and time.perf_counter() - begun_s < MOST_S:
        step()
    begins, slowdown = reducer.step, statistics.mean(took_s) / plain_s
    for _ in range(5):
        step()
    wire.detach()
    dist.destroy_process_group()
    return {
        "attach_s": attach_s,
        "first_s": took_s[0],
        "longest_s": max(took_s),
        "slowdown": slowdown,
        "begins": begins,
    }


def told(recipe: str, folder: str, *, first: bool) -> dict[str, float]:
    """What rank 0 of two found, with the caches in `folder`."""
    places = {"NUMBA_CACHE_DIR": folder, "XDG_CACHE_HOME": folder, "GRADWIRE_COMPILE_FIRST": str(int(first))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.first_step", "--rank-of", recipe],
            env=os.environ
            | places
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": "29541"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def main() -> None:
    """A row for each recipe and cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--compile-first", action="store_true")
    parser.add_argument("--rank-of")
    asked = parser.parse_args()
    if asked.rank_of:
        print(json.dumps(trained(asked.rank_of)))
        return
    heads = "recipe", "cache", "attach", "first step", "longest step", "mean beside DDP's", "begins at step"
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for recipe in asked.recipes:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm"):
                row = told(recipe, folder, first=asked.compile_first)
                times = " | ".join(f"{row[name]:.2f} s" for name in ("attach_s", "first_s", "longest_s"))
                print(
                    f"| `{recipe}` | {cache} | {times} | {row['slowdown']:.2f} | {row['begins']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
