"""Does `auto` choose with an empty kernel cache what it chooses with a warm one?

`python -m benchmarks.cold_choice`. Goal: in 9 of 10 settings the choice is the same, or as fast. Two ranks
on this machine train until `auto` has chosen: over an emulated link, on an empty cache, then twice on the
cache that this has filled. The second of these runs shows how often a choice differs from itself. A choice
is level with another if, by the times that `auto` measured in the other's run, it is at most 5 % slower.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


class Setting(NamedTuple):
    """A model of `layers` matrices of `width` x `width`, a batch, and a rate."""

    width: int
    layers: int
    batch: int
    rate: str


SETTINGS = tuple(
    Setting(width, layers, batch, rate)
    for width, layers, batch in ((256, 4, 64), (512, 2, 128))
    for rate in ("10mbit", "20mbit", "50mbit", "100mbit", "400mbit")
)
LEVEL = 1.05
MOST_S = 400.0


def chosen(setting: Setting) -> dict[str, Any] | None:
    """On one rank: train until `auto` has chosen. Returns what rank 0 reports."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = [setting.width] * setting.layers
    model = nn.Sequential(*(each for size in sizes for each in (nn.Linear(size, size), nn.ReLU())))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    wire = gradwire.attach(ddp, optimizer)
    steps, begun_s = 0, time.perf_counter()
    while not wire.settled:
        optimizer.zero_grad()
        ddp(torch.randn(setting.batch, setting.width)).square().mean().backward()
        optimizer.step()
        steps += 1
    report, took_s = wire.report(), time.perf_counter() - begun_s
    runs = next((each.recipe for each in report.choices if each.verdict == "runs"), report.recipe)
    wire.detach()
    rank = dist.get_rank()
    dist.destroy_process_group()
    times_s = {str(each.recipe): each.measured_step_s for each in report.choices if each.measured_step_s}
    return {"recipe": runs, "steps": steps, "took_s": took_s, "times_s": times_s} if rank == 0 else None


def run(setting: Setting, cache: str) -> dict[str, Any]:
    """What rank 0 reports, with kernels in the folder `cache`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "GRADWIRE_COMPILE_FIRST": "0"}
    command = [sys.executable, "-m", "gradwire", "net", "run", "--workers", "2", "--rate", setting.rate]
    command += ["--mode", "backend", "--", sys.executable, "-m", "benchmarks.cold_choice", "--rank"]
    done = subprocess.run(
        [*command, json.dumps(setting)], env=environment, capture_output=True, text=True, timeout=MOST_S
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def is_level(recipe: str, other: dict[str, Any]) -> bool:
    """Whether `recipe` is what the `other` run has chosen, or as fast by its times."""
    if recipe == other["recipe"]:
        return True
    times_s = other["times_s"]
    return recipe in times_s and times_s[recipe] <= LEVEL * times_s.get(other["recipe"], 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="so many of them")
    parser.add_argument("--within", type=float, default=3600.0, help="begin no setting after so many seconds")
    parser.add_argument("--json", help="also write the results here")
    arguments = parser.parse_args()
    if arguments.rank:
        if (found := chosen(Setting(*json.loads(arguments.rank)))) is not None:
            print(json.dumps(found), flush=True)
        return
    print("| width x layers, batch | rate | cold | warm | warm again | took | alike | warm ones alike |")
    print("|---|---|---|---|---|---|---|---|")
    lines, begun_s = [], time.perf_counter()
    for setting in SETTINGS[: arguments.settings]:
        if time.perf_counter() - begun_s > arguments.within:
            break
        with tempfile.TemporaryDirectory() as cache:
            cold, warm, again = (run(setting, cache) for _ in range(3))
        same, itself = is_level(cold["recipe"], warm), is_level(again["recipe"], warm)
        lines.append(
            {
                "setting": setting._asdict(),
                "cold": cold,
                "warm": warm,
                "again": again,
                "same": same,
                "itself": itself,
            }
        )
        print(
            f"| {setting.width} x {setting.layers}, {setting.batch} | {setting.rate} | `{cold['recipe']}` "
            f"| `{warm['recipe']}` | `{again['recipe']}` | {cold['took_s']:.0f}, {warm['took_s']:.0f} s "
            f"| {'yes' if same else 'no'} | {'yes' if itself else 'no'} |",
            flush=True,
        )
    print(
        f"\ncold like warm in {sum(each['same'] for each in lines)} of {len(lines)}; "
        f"warm like itself in {sum(each['itself'] for each in lines)}"
    )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
