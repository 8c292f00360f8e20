"""How fast are signs with a scale and error feedback?

One step on a whole gradient: memory += gradient, the mean magnitude of the sum, its signs packed to one bit
each, and the memory left without what they say. On one thread, beside numpy (packbits) and eager torch: each
as one writes it, and with temporary arrays kept from step to step, which spares it the first touch of fresh
memory; torch also with numpy's packbits, its own arithmetic being slower. Twice each for the A/A spread.
Every result of every repetition is checked against float64. Ours are two calls: under DDP the compensation
runs when a bucket arrives. "blocks" has a scale for every 64 Ki elements.

Goal: 8 times faster than the fastest peer. All but the plain torch run at the speed of memory, where what
counts is how often 4 bytes per element cross it: 12 times for a peer that keeps its arrays (3 to add, 3 for
the mean magnitude, 1 to compare, 5 to subtract), 6 times for "whole", 5 for "blocks". So the goal can be met
against fresh temporaries, and not against kept ones.

    python benchmarks/sign.py [--elements 33554432] [--repetitions 9] [--json PATH]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gradwire.kernels.compensation import compensate
from gradwire.kernels.compiler import imported, prepare
from gradwire.kernels.layouts import Blocks
from gradwire.kernels.signs import pack_signs
from gradwire_lab.bench.runner import machine
from gradwire_lab.bench.statistics import mixed, paired

GOAL, STRETCH, BLOCK = 8.0, 15.0, 2**16
Coded = tuple[NDArray[np.floating], NDArray[np.uint8]]  # scales and packed bits
Job = Callable[[Tensor, Tensor, "Scratch"], Coded]


class Scratch:
    """What a job may keep from step to step."""

    def __init__(self, n: int) -> None:
        self.floats, self.flags = torch.zeros(n), torch.zeros(n, dtype=torch.bool)
        self.long = torch.zeros(n // 8, dtype=torch.int64)
        self.packed = torch.zeros(n // 8, dtype=torch.uint8)
        self.scale, self.scales = torch.zeros(1, 1), torch.zeros(-(-n // BLOCK), 1)


def numpy_plain(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """As one writes it."""
    x = memory.numpy()
    x += grad.numpy()
    scale = np.abs(x).mean()
    bits = x >= 0
    packed = np.packbits(bits, bitorder="little")
    x -= np.copysign(scale, x)
    return scale.reshape(1), packed


def numpy_kept(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """With temporary arrays kept."""
    x, floats, flags = memory.numpy(), scratch.floats.numpy(), scratch.flags.numpy()
    np.add(x, grad.numpy(), out=x)
    scale = np.abs(x, out=floats).mean()
    packed = np.packbits(np.greater_equal(x, 0, out=flags), bitorder="little")
    np.subtract(x, np.copysign(scale, x, out=floats), out=x)
    return scale.reshape(1), packed


WEIGHTS = 0x0102040810204080
"""Times eight flags in eight bytes: the highest byte of the product has them as bits."""


def torch_plain(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """As one writes it, with the fastest way to pack that torch's operations allow."""
    x = memory.add_(grad)
    scale = x.abs().mean()
    packed = (((x >= 0).view(torch.int64) * WEIGHTS) >> 56).to(torch.uint8)
    x.sub_(torch.copysign(scale, x))
    return scale.view(1).numpy(), packed.numpy()


def torch_kept(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """With temporary tensors kept."""
    x = memory.add_(grad)
    scale = torch.abs(x, out=scratch.floats).mean()
    torch.ge(x, 0.0, out=scratch.flags)
    torch.mul(scratch.flags.view(torch.int64), WEIGHTS, out=scratch.long)
    scratch.packed.copy_(scratch.long.bitwise_right_shift_(56))
    x.sub_(torch.copysign(scale, x, out=scratch.floats))
    return scale.view(1).numpy(), scratch.packed.numpy()


def torch_and_numpy(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """Temporary tensors kept, and packed by numpy."""
    x = memory.add_(grad)
    scale = torch.abs(x, out=scratch.floats).mean()
    packed = np.packbits(torch.ge(x, 0.0, out=scratch.flags).numpy(), bitorder="little")
    x.sub_(torch.copysign(scale, x, out=scratch.floats))
    return scale.view(1).numpy(), packed


def whole(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """One scale."""
    compensate(memory, memory, grad, 1.0)
    pack_signs(memory, Blocks((memory.numel(),)), scratch.scale, scratch.packed, leave=True)
    return scratch.scale[0].numpy(), scratch.packed.numpy()


def blocks(memory: Tensor, grad: Tensor, scratch: Scratch) -> Coded:
    """A scale per block."""
    compensate(memory, memory, grad, 1.0)
    pack_signs(memory, Blocks((memory.numel(),), BLOCK), scratch.scales, scratch.packed, leave=True)
    return scratch.scales[:, 0].numpy(), scratch.packed.numpy()


PEERS: dict[str, Job] = {
    "numpy": numpy_plain,
    "numpy, kept": numpy_kept,
    "torch": torch_plain,
    "torch, kept": torch_kept,
    "torch + packbits, kept": torch_and_numpy,
}
OURS: dict[str, Job] = {"whole": whole, "blocks": blocks}
JOBS: dict[str, Job] = {
    **PEERS,
    **OURS,
    **{f"{name} again": job for name, job in (PEERS | OURS).items()},
}


def check(name: str, total: Tensor, memory: Tensor, coded: Coded) -> None:
    """Raise unless bits, scales and memory are those of `total`; the means are taken in float64."""
    scales, packed = coded
    x = total.numpy()
    if not np.array_equal(np.unpackbits(packed, bitorder="little").view(bool), x >= 0):
        raise AssertionError(f"{name}: wrong bits")
    step = BLOCK if len(scales) > 1 else x.size
    exact = np.add.reduceat(np.abs(x, dtype=np.float64), np.arange(0, x.size, step)) / step
    # Peers add up in float32, in pairs or flat buffers: a relative 1e-4 at most.
    if not np.allclose(scales, exact, rtol=1e-4 if name.split(" again")[0] in PEERS else 1e-7, atol=0):
        raise AssertionError(f"{name}: scales {scales} are not {exact}")
    left = x - np.repeat(scales.astype(np.float32), step)[: x.size] * np.where(x >= 0, 1.0, -1.0).astype("f4")
    if not np.array_equal(left, memory.numpy()):
        raise AssertionError(f"{name}: wrong memory")


def repetition(n: int, number: int, scratch: Scratch) -> dict[str, dict[str, float]]:
    """Wall-clock and CPU seconds of every job on one fresh draw."""
    start, grad = torch.randn(n), torch.randn(n)
    total, memory, seconds = start + grad, torch.empty(n), {}
    for name in mixed(list(JOBS), number):
        memory.copy_(start)
        wall, cpu = time.perf_counter(), time.process_time()
        coded = JOBS[name](memory, grad, scratch)
        seconds[name] = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        check(name, total, memory, coded)
    return seconds


def compared(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, ratios of every peer to each of ours, and every setting to itself."""

    def column(name: str, clock: str = "wall_s") -> list[float]:
        return [run[name][clock] for run in runs]

    pairs = {f"{peer} / {mine}": (peer, mine) for peer in PEERS for mine in OURS}
    pairs |= {f"{name} (A/A)": (f"{name} again", name) for name in PEERS | OURS}
    return {
        "ratios": {key: vars(paired(column(top), column(bottom))) for key, (top, bottom) in pairs.items()},
        "median_wall_s": {name: median(column(name)) for name in JOBS},
        "median_cpu_s": {name: median(column(name, "cpu_s")) for name in JOBS},
        "runs": runs,
    }


def table(results: dict[str, Any], n: int) -> Table:
    """One row per job; times in milliseconds."""
    title = f"ms per step of {n / 2**20:.3g} Mi elements, one thread"
    view = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    view.add_column("job", no_wrap=True)
    for head in ("wall", "CPU", "A/A, 95 %", *(f"times {mine}" for mine in OURS)):
        view.add_column(head, justify="right", no_wrap=True)
    for name in PEERS | OURS:
        ratios = results["ratios"]
        own = ratios[f"{name} (A/A)"]
        view.add_row(
            name,
            *(f"{1e3 * results[f'median_{clock}_s'][name]:.1f}" for clock in ("wall", "cpu")),
            f"{own['low']:.2f} … {own['high']:.2f}",
            *(f"{ratios[f'{name} / {mine}']['ratio']:.1f}" if name in PEERS else "" for mine in OURS),
        )
    return view


def verdict(results: dict[str, Any]) -> str:
    """What became of the goal: against peers as one writes them, and against the fastest of all."""
    lines = []
    for what, names in (("as one writes it", ("numpy", "torch")), ("of all", tuple(PEERS))):
        peer = min(names, key=lambda name: results["median_wall_s"][name])
        ratio = results["ratios"][f"{peer} / whole"]
        met = "stretch met" if ratio["ratio"] >= STRETCH else "met" if ratio["ratio"] >= GOAL else "missed"
        lines.append(
            f"fastest peer {what}: {peer}, {ratio['ratio']:.1f} times ({ratio['low']:.1f} … "
            f"{ratio['high']:.1f}) as long as ours; goal {GOAL:.0f}: {met}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2**25, help=f"a multiple of {BLOCK}")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.elements % BLOCK:
        parser.error(f"--elements {arguments.elements} is not a multiple of {BLOCK}")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    prepare(imported())
    scratch = Scratch(arguments.elements)
    repetition(arguments.elements, 0, scratch)  # the first use of memory, caches and libraries does not count
    runs = [repetition(arguments.elements, number, scratch) for number in range(arguments.repetitions)]
    results = compared(runs)
    Console(width=max(Console().width, 110)).print(table(results, arguments.elements))
    print(f"seed {arguments.seed}; every result checked\n{verdict(results)}")
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        document = {"settings": settings, "machine": machine(), "results": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
