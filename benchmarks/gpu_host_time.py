"""How long does a step keep the host of a GPU, and how long does it take, beside DDP and torch's own hooks?

One rank over NCCL, which is alone and does all that it would do with others: what a link adds is left out. A
transformer whose step takes some 20 ms trains with each contestant in turns, in another order each time, and
steps are compared with DDP's of the same turn. By way of the host, steps of some 100 ms are compared, and
the processor time is counted of the thread that waits for gradients, which shall sleep. The host's time of a
unit is what torch's profiler shows of gradwire's own ranges, encode and decode; the profiler adds to it. All
that `backward` takes the host is measured without one, while the device has nothing else to do.

Needs a CUDA device, and says so where there is none.

    PYTHONPATH=src python benchmarks/gpu_host_time.py [--turns 7] [--json PATH]
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from gpu_kernels import Figure, one_rank
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.step.worker import WAITS

STEP_S = 0.020
WIDTH, LAYERS, LENGTH = 512, 6, 256
STEPS = 10
"""Of a turn."""
RECIPES = {
    "dense": 1.02,
    "int8": 1.05,
    "fp8": None,
    "int4": None,
    "topk(ratio=0.01)": None,
    "leader_topk(ratio=0.01)": None,
}
"""Recipes, and the goal for a step beside DDP's where there is one."""
DDP = "DDP"
LONG_S = 0.100
BY_HOST = {"dense": 1.10, "int8": None}
"""Recipes by way of the host, in longer steps, and the goal beside DDP's, which stays on the device."""


class Contestant(NamedTuple):
    """A model that trains in its own way."""

    step: Callable[[], None]
    wire: gradwire.Wire | None


def _hooks() -> dict[str, Callable[[DistributedDataParallel], None]]:
    """torch's own."""
    return {
        "fp16_compress_hook": lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook),
        "bf16_compress_hook": lambda ddp: ddp.register_comm_hook(None, bf16_compress_hook),
        "powerSGD_hook": lambda ddp: ddp.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook
        ),
    }


def contestant(name: str, inputs: Tensor, placement: PlacementName = "device") -> Contestant:
    """By the name of a recipe, which works in `placement`, or of a hook of torch's; or plain DDP."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    ddp = DistributedDataParallel(nn.TransformerEncoder(layer, LAYERS).to("cuda"), device_ids=[0])
    optimizer, wire = torch.optim.SGD(ddp.parameters(), lr=1e-4), None
    if name in _hooks():
        _hooks()[name](ddp)
    elif name != DDP:
        wire = gradwire.attach(ddp, optimizer, name, placement=placement)

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(6):
        step()
    torch.cuda.synchronize()
    return Contestant(step, wire)


def step_s(each: Contestant) -> float:
    """Seconds of a step on the device, over the steps of a turn."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        each.step()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / STEPS


def host_s(each: Contestant) -> float:
    """Seconds until a step returns, the median of a turn."""
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        each.step()
        times.append(time.perf_counter() - start_s)
    return median(times)


def unit_us(each: Contestant) -> float | None:
    """Microseconds of encode and decode for each unit, by torch's profiler; `None` without a wire."""
    if each.wire is None or not each.wire.report().units:
        return None
    with profile(activities=[ProfilerActivity.CPU]) as told:
        for _ in range(STEPS):
            each.step()
        torch.cuda.synchronize()
    ours = [
        event for event in told.key_averages() if event.key.startswith(("gradwire/encode", "gradwire/decode"))
    ]
    return sum(event.cpu_time_total for event in ours) / STEPS / each.wire.report().units


def inputs_for(step: float) -> Tensor:
    """As many sequences as make DDP's step about so long, from one try."""
    few = torch.randn(8, LENGTH, WIDTH, device="cuda")
    taken_s = step_s(contestant(DDP, few))
    return torch.randn(max(1, round(8 * step / taken_s)), LENGTH, WIDTH, device="cuda")


def waiting_s() -> float:
    """Processor seconds so far of all threads of this process that wait for a device."""
    waiting = [each.ident for each in threading.enumerate() if each.name == WAITS]
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in waiting if ident is not None
    )


def by_the_host(turns: int) -> list[Figure]:
    """Steps by way of the host beside DDP's, what cannot be hidden, and what the thread that waits takes."""
    with one_rank():
        inputs = inputs_for(LONG_S)
        all_of_them = {DDP: contestant(DDP, inputs)}
        all_of_them |= {name: contestant(name, inputs, "host") for name in BY_HOST}
        beside: dict[str, list[float]] = {name: [] for name in BY_HOST}
        waits_s: dict[str, list[float]] = {name: [] for name in BY_HOST}
        for _turn in range(turns):
            alone_s = step_s(all_of_them[DDP])
            for name in BY_HOST:
                before_s = waiting_s()
                beside[name].append(step_s(all_of_them[name]) / alone_s)
                waits_s[name].append((waiting_s() - before_s) / STEPS)
        found = []
        for name, goal in BY_HOST.items():
            wire, where = all_of_them[name].wire, f"{name} by way of the host"
            copied_s = 0.0 if wire is None else wire.report().copied_s
            found += [
                Figure(
                    f"a step of {where} beside DDP's", median(beside[name]), "times", goal, at_least=False
                ),
                Figure(f"copies of a step of {where}, both ways", 1e3 * copied_s, "ms"),
                Figure(f"processor time of the waiting thread, {where}", 1e3 * median(waits_s[name]), "ms"),
            ]
    return found


def figures(turns: int) -> list[Figure]:
    """All of it."""
    with one_rank():
        inputs = inputs_for(STEP_S)
        names = [DDP, *_hooks(), *RECIPES]
        all_of_them = {name: contestant(name, inputs) for name in names}
        steps: dict[str, list[float]] = {name: [] for name in names}
        hosts: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                steps[name].append(step_s(all_of_them[name]))
                hosts[name].append(host_s(all_of_them[name]))
        units = {name: unit_us(each) for name, each in all_of_them.items()}
    found = [Figure("a step of DDP", 1e3 * median(steps[DDP]), "ms")]
    for name in names[1:]:
        beside = [one / other for one, other in zip(steps[name], steps[DDP], strict=True)]
        more_s = [one - other for one, other in zip(hosts[name], hosts[DDP], strict=True)]
        goal = RECIPES.get(name)
        found.append(Figure(f"a step of {name} beside DDP's", median(beside), "times", goal, at_least=False))
        found.append(Figure(f"host time of a step of {name} beyond DDP's", 1e3 * median(more_s), "ms"))
        unit = units[name]
        if unit is not None:
            found.append(Figure(f"host time of a unit of {name}", unit, "µs"))
    return found + by_the_host(min(turns, 3))


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device: nothing is measured")
        return
    found = figures(options.turns)
    for figure in found:
        print(f"{figure.name}: {figure.text()}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([each._asdict() for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
