"""How small is a near-lossless gradient, at the same bound on the error of each value?

Real gradients of a model in training, with parameters and optimizer state. GComp's metric δ = C/g compares
what an update is added to with the gradient; an error of the gradient below 2^-23·|C| moves no parameter by
more than an ulp. That is the bound for all:

- `paper`: GComp's own layout. The largest of the levels 0, 6, 12, 18 with |δ| > 2^level is cut off and named
  in 2 bits beside every value that is not zero, and one table codes all exponents.
- `+ tables`: the same with a table for each parameter.
- `+ implicit`: thresholds. C, known to all replicas, says where a value ends, so nothing travels beside it:
  as fine as a bit, without end at 18, and what is below half a step becomes zero. One table.
- `ours`: both.
- `ours, ≤ 18 bits`: no value loses more than 18 bits, the most that the paper cuts from any (this needs the
  value itself, so it is an account of where the gain comes from, not a method).
- `ours, half the bound`: thresholds one bit lower, 2^-24·|C|.
- `lossless`: a table for each parameter, nothing cut.

Rounding to nearest errs by half of what truncation does, so that at the same bound one bit more may go than
the paper's levels. The paper's truncation is given its bound, 2^level ulps of the gradient, not rounding's.
Tables are those of the snapshot before, or built from the same for the first; their 128 bytes are counted
once per snapshot. Every size is that of whole frames, headers and checksums included; every frame is decoded,
and the largest error is printed in units of the bound. GComp's frames are read with the levels they carry.

Goal: ours at most 0.85 of the paper's layout (stretch 0.82).

    python benchmarks/near_lossless_size.py [--workloads chargpt resnet18] [--at 20 40 60] [--json PATH]
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.gcomp import CodeTable, Key, frame, histogram, unframe
from gradwire.codec.gcomp.rounding import Dropped
from gradwire_lab.workloads import catalogue

KEY = Key(step=0, unit=0, hop=0)
TABLE_BITS = 8 * 128


@dataclass(frozen=True)
class Captured:
    """One parameter before a step: all flat, copies, in the gradient's order."""

    name: str
    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    """The optimizer's, per element; empty at its first step."""
    options: dict[str, Any]
    """Of its parameter group."""
    optimizer: type[torch.optim.Optimizer]
    steps: int
    """Those that the optimizer has taken."""


def snapshots(workload_text: str, at: list[int]) -> Iterator[tuple[int, list[Captured]]]:
    """(step, parameters that have a gradient), at each of the ascending steps `at`, before it is taken."""
    workload = catalogue.workload(workload_text)
    model = workload.model(seed=0)
    optimizer = workload.optimizer(model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    batches = workload.batches(0, 1, seed=0)
    for step in range(at[-1] + 1):
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, next(batches)).backward()
        if step in at:
            yield step, list(_captured(optimizer, names, step))
        optimizer.step()


def _captured(
    optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], step: int
) -> Iterator[Captured]:
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = {
                    key: value.detach().reshape(-1).clone()
                    for key, value in optimizer.state[parameter].items()
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                }
                values, gradient = parameter.detach().reshape(-1).clone(), parameter.grad.reshape(-1).clone()
                yield Captured(names[parameter], values, gradient, state, options, type(optimizer), step)


def metric(seen: Captured) -> Tensor:
    """C of every element (GComp, table 2), float64: δ = C/g."""
    options = seen.options
    theta, lr, decay = seen.parameter.double(), options["lr"], options["weight_decay"]
    if seen.optimizer is torch.optim.SGD:
        kept, share = torch.zeros_like(theta), 1.0
        if options["momentum"] and "momentum_buffer" in seen.state:
            # Torch's first momentum step has b = g, without the dampening.
            kept = options["momentum"] * seen.state["momentum_buffer"].double()
            share = 1.0 - options["dampening"]
        assert not options["nesterov"]
        return (theta - lr * kept) / (lr * share) - decay * theta
    assert seen.optimizer in (torch.optim.Adam, torch.optim.AdamW)
    first, second = options["betas"]
    if not seen.state:
        return torch.zeros_like(theta)  # the second moment would be the gradient's own: nothing is cut
    steps = seen.steps + 1
    root = (seen.state["exp_avg_sq"].double() / (1.0 - second**seen.steps)).sqrt() + options["eps"]
    moved = lr * first * seen.state["exp_avg"].double()
    if seen.optimizer is torch.optim.AdamW:
        theta = theta * (1.0 - lr * decay)
        decay = 0.0
    return (theta * root * (1.0 - first**steps) - moved) / (lr * (1.0 - first)) - decay * theta


def exponents(x: Tensor) -> Tensor:
    """Biased exponents of |x| as float32 has them, rounded down: int64."""
    whole = torch.frexp(x.double().abs())[1].long() - 1 + 127
    return torch.where(x == 0, 0, whole).clamp(0, 254)


def levels(gradient: Tensor, c: Tensor) -> Tensor:
    """GComp's: the largest of 0, 6, 12, 18 with |δ| > 2^level."""
    ratio = (c / gradient.double()).abs()
    found = torch.zeros(gradient.numel(), dtype=torch.uint8)
    for level in (6, 12, 18):
        found[ratio > 2.0**level] = level
    return found


def thresholds(gradient: Tensor, c: Tensor, over: int = 1, most: int | None = None) -> Tensor:
    """One above C's exponent: rounding then errs by 2^-23·|C| at most."""
    found = (exponents(c) + over).clamp(0, 255)
    if most is not None:
        found = torch.minimum(found, exponents(gradient) + most)
    return torch.where(c == 0, 0, found).to(torch.uint8)


Drop = Callable[[Tensor, Tensor], Dropped]


@dataclass(frozen=True)
class Layout:
    """How a gradient is written."""

    drop: Drop
    explicit: bool = False
    flush: bool = True
    own_tables: bool = True


LAYOUTS = {
    "paper": Layout(levels, explicit=True, own_tables=False),
    "+ tables": Layout(levels, explicit=True),
    "+ implicit": Layout(thresholds, own_tables=False),
    "ours": Layout(thresholds),
    "ours, ≤ 18 bits": Layout(lambda g, c: thresholds(g, c, most=18)),
    "ours, half the bound": Layout(lambda g, c: thresholds(g, c, over=0)),
    "lossless": Layout(lambda _g, _c: 0, flush=False),
}


def histograms(layout: Layout, seen: list[Captured], cs: list[Tensor]) -> list[Tensor]:
    """Counts by parameter, or the same sum for all of them."""
    found = [
        histogram(s.gradient, layout.drop(s.gradient, c), explicit=layout.explicit, flush=layout.flush)
        for s, c in zip(seen, cs, strict=True)
    ]
    return found if layout.own_tables else [torch.stack(found).sum(0)] * len(found)


def size(layout: Layout, seen: list[Captured], cs: list[Tensor], counts: list[Tensor]) -> tuple[float, float]:
    """Share of the original, and the largest error in units of 2^-23·|C|."""
    bits = TABLE_BITS * (len(counts) if layout.own_tables else 1)
    total, worst = 0, 0.0
    for s, c, count in zip(seen, cs, counts, strict=True):
        table, dropped = CodeTable.from_histogram(count), layout.drop(s.gradient, c)
        data = frame(s.gradient, dropped, table, KEY, explicit=layout.explicit, flush=layout.flush)
        out = torch.empty_like(s.gradient)
        unframe(data, out, None if layout.explicit else dropped, {table.id: table}, KEY)
        bits += 8 * data.numel()
        total += 32 * s.gradient.numel()
        error = (out.double() - s.gradient.double()).abs() / (c.abs() * 2.0**-23)
        normal = (error > 0) & (s.gradient.abs() >= 2.0**-126)  # smaller ones are flushed by all but lossless
        worst = max(worst, float(error[normal].max()) if normal.any() else 0.0)
    return bits / total, worst


def measure(workload: str, at: list[int]) -> list[dict[str, Any]]:
    """Every layout at every snapshot."""
    rows, before = [], dict[str, list[Tensor]]()
    for step, seen in snapshots(workload, at):
        cs = [metric(s) for s in seen]
        everything = torch.cat([s.gradient for s in seen])
        counts = histogram(everything)
        shares = {}
        for name, layout in LAYOUTS.items():
            now = histograms(layout, seen, cs)
            share, worst = size(layout, seen, cs, before.get(name, now))
            before[name] = now
            shares[name] = {"share": share, "worst": worst}
        rows.append(
            {
                "workload": workload,
                "step": step,
                "layouts": shares,
                "ratio": shares["ours"]["share"] / shares["paper"]["share"],
                "top15": float(counts.sort(descending=True).values[:15].sum() / counts.sum()),
                "zeros": float((everything == 0).float().mean()),
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """A row as text."""
    print(
        f"\n{row['workload']}, step {row['step']}: top 15 exponents {row['top15']:.1%}, "
        f"zeros {row['zeros']:.1%}, ours / paper {row['ratio']:.3f}"
    )
    for name, found in row["layouts"].items():
        print(f"  {name:<22}{found['share']:>8.2%}   largest error {found['worst']:.2f} of the bound")


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["chargpt", "resnet18"])
    parser.add_argument("--at", nargs="+", type=int, default=[20, 40, 60])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for workload in arguments.workloads for row in measure(workload, sorted(arguments.at))]
    for workload in arguments.workloads:
        ratio = median(row["ratio"] for row in rows if row["workload"] == workload)
        print(f"\ngoal: {workload}, ours at most 0.85 of the paper's: {ratio:.3f},", end=" ")
        print("met" if ratio <= 0.85 else "missed")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
