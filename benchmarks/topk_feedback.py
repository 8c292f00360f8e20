"""How fast is an exact top-k with error feedback?

One step on a whole gradient: memory += gradient, choose the top 1 % of the sum by magnitude, read the values
and zero them in the memory. On one thread, beside the same in eager torch, for sums of many kinds; twice
each, for the A/A spread. Every result of every repetition is checked against a sort. Goals: 12 times
faster on Gaussian sums, and slower on none.

    python benchmarks/topk_feedback.py [--elements 33554432] [--others 8388608] [--ratio 0.01] [--json PATH]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gradwire.kernels.compensation import compensate
from gradwire.kernels.compiler import imported, prepare
from gradwire.kernels.places import take
from gradwire.kernels.topk import topk_indices
from gradwire_lab.bench.runner import machine
from gradwire_lab.bench.statistics import mixed, paired

HEADLINE, GOAL = "Gaussian", 12.0
Chosen = tuple[Tensor, Tensor]  # indices and values
Job = Callable[[Tensor, Tensor, int], Chosen]


def eager(memory: Tensor, grad: Tensor, k: int) -> Chosen:
    """The peer."""
    x = memory.add_(grad)
    _, indices = x.abs().topk(k, sorted=False)
    values = x[indices]
    x[indices] = 0.0
    return indices, values


def ours(memory: Tensor, grad: Tensor, k: int) -> Chosen:
    """Three calls: under DDP the compensation runs when a bucket arrives."""
    compensate(memory, memory, grad, 1.0)
    indices = topk_indices(memory, k)
    return indices, take(memory, indices)


JOBS: dict[str, Job] = {
    "torch": eager,
    "torch again": eager,
    "gradwire": ours,
    "gradwire again": ours,
}


def student_t(n: int) -> Tensor:
    """Student's t with 2 degrees of freedom, from its quantile function."""
    u = torch.rand(n)
    return (2 * u - 1) / (2 * u * (1 - u)).sqrt()


def outlier(n: int) -> Tensor:
    """Gaussian but for one element."""
    x = torch.randn(n)
    x[int(torch.randint(n, ()))] = 1e30
    return x


KINDS: dict[str, Callable[[int], Tensor]] = {
    HEADLINE: torch.randn,
    "Student t, 2 d.o.f.": student_t,
    "Cauchy": lambda n: torch.empty(n).cauchy_(),
    "ties, 7 levels": lambda n: torch.randint(-3, 4, (n,)).float(),
    "50 % zeros": lambda n: torch.randn(n) * (torch.rand(n) < 0.5),
    "all zeros": torch.zeros,
    "constant": lambda n: torch.full((n,), float(torch.rand(()))),
    "one huge outlier": outlier,
    "ascending": lambda n: torch.rand(n).sort().values,
    "descending": lambda n: torch.rand(n).sort(descending=True).values,
}


def check(name: str, total: Tensor, memory: Tensor, chosen: Chosen, magnitudes: np.ndarray) -> None:
    """Raise unless `chosen` is the top of `total`, and `memory` the rest; `magnitudes` are sorted."""
    indices, values = (part.numpy() for part in chosen)
    k = len(indices)
    if not np.array_equal(np.sort(np.abs(values)), magnitudes[len(magnitudes) - k :]):
        raise AssertionError(f"{name}: not the {k} largest magnitudes")
    rest = total.clone()
    rest[chosen[0]] = 0.0
    if not (torch.equal(total[chosen[0]], chosen[1]) and torch.equal(rest, memory)):
        raise AssertionError(f"{name}: values or memory are wrong")
    if JOBS[name] is ours:
        threshold = magnitudes[len(magnitudes) - k]
        mine = indices[np.abs(values) == threshold]
        if not np.array_equal(mine, np.flatnonzero(total.abs().numpy() == threshold)[: len(mine)]):
            raise AssertionError(f"{name}: of equal magnitudes, not the lowest indices")


def repetition(make: Callable[[int], Tensor], n: int, k: int, number: int) -> dict[str, dict[str, float]]:
    """Wall-clock and CPU seconds of every job on one fresh draw."""
    half = make(n).mul_(0.5)  # memory and gradient: their sum is twice that, exactly
    total = half + half
    magnitudes = np.sort(total.abs().numpy())
    seconds = {}
    memory = torch.empty_like(half)
    for name in mixed(list(JOBS), number):
        memory.copy_(half)
        wall, cpu = time.perf_counter(), time.process_time()
        chosen = JOBS[name](memory, half, k)
        seconds[name] = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        check(name, total, memory, chosen, magnitudes)
    return seconds


def compared(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, paired ratios and A/A spreads of one kind."""

    def column(name: str, clock: str = "wall_s") -> list[float]:
        return [run[name][clock] for run in runs]

    pairs = {
        "torch / gradwire": ("torch", "gradwire"),
        "torch / torch (A/A)": ("torch again", "torch"),
        "gradwire / gradwire (A/A)": ("gradwire again", "gradwire"),
    }
    return {
        "ratios": {key: vars(paired(column(top), column(bottom))) for key, (top, bottom) in pairs.items()},
        "median_wall_s": {name: median(column(name)) for name in JOBS},
        "median_cpu_s": {name: median(column(name, "cpu_s")) for name in JOBS},
        "runs": runs,
    }


def measured(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind after kind, each with its comparison; the first, the headline, at a size of its own."""
    for kind, make in KINDS.items():
        if kind in (arguments.kinds or KINDS):
            n = arguments.elements if kind == HEADLINE else arguments.others
            k = round(arguments.ratio * n)
            repetition(make, n, k, 0)  # the first use of memory, caches and libraries does not count
            runs = [repetition(make, n, k, number) for number in range(arguments.repetitions)]
            yield kind, {"elements": n, "k": k, **compared(runs)}


def interval(ratio: dict[str, float]) -> str:
    """A paired ratio's 95 % interval."""
    return f"{ratio['low']:.2f} … {ratio['high']:.2f}"


def table(results: dict[str, Any]) -> Table:
    """One row per kind; times in milliseconds."""
    view = Table(title="ms per step, one thread", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    view.add_column("kind of sum", no_wrap=True)
    for head in ("size", "torch", "gradwire", "torch/gradwire", "95 %", "A/A torch", "A/A gradwire"):
        view.add_column(head, justify="right", no_wrap=True)
    for kind, result in results.items():
        ratios, wall_s = result["ratios"], result["median_wall_s"]
        view.add_row(
            kind,
            f"{result['elements'] / 2**20:.3g} Mi",
            *(f"{1e3 * wall_s[name]:.1f}" for name in ("torch", "gradwire")),
            f"{ratios['torch / gradwire']['ratio']:.1f}",
            *(
                interval(ratios[pair])
                for pair in ("torch / gradwire", "torch / torch (A/A)", "gradwire / gradwire (A/A)")
            ),
        )
    return view


def verdict(results: dict[str, Any]) -> str:
    """What became of the goals."""
    faster = {kind: result["ratios"]["torch / gradwire"] for kind, result in results.items()}
    lines = []
    if HEADLINE in faster:
        met = "met" if faster[HEADLINE]["ratio"] >= GOAL else "missed"
        lines.append(f"goal: {GOAL:.0f} times faster on Gaussian sums: {met}")
    slower = [kind for kind, ratio in faster.items() if ratio["low"] < 1.0]
    lines.append(f"goal: never slower: {f'missed on {slower}' if slower else 'met'}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2**25, help=f"of the {HEADLINE} sum")
    parser.add_argument("--others", type=int, default=2**23, help="elements of the other sums")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    prepare(imported())
    results = dict(measured(arguments))
    Console(width=max(Console().width, 120)).print(table(results))
    print(f"seed {arguments.seed}; every result checked\n{verdict(results)}")
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        document = {"settings": settings, "machine": machine(), "results": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
