"""How many bits do 16-bit weights change by, from one optimizer step to the next?

A gather in bfloat16 sends 16 bits a parameter. A receiver that keeps what it got last needs the change only.
Models of the lab train in float32 and compute with weights rounded to bfloat16, whose gradients pass to the
masters unchanged, as under `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. Arithmetic between weights is
float32, on one rank. After every `--every`-th step the rounded weights are compared with those before that
step, and the script prints bits per parameter of

- the floor: the entropy of the change, given the exponent of the old weight, which the receiver has. It is
  of each module by itself, so that a model's is their mean. It is the least that a code of single changes by
  exponent takes, with tables that cost nothing;
- runs: per exponent Rice codes of the gaps between changes and of the changes, or of every change where most
  weights change, each with the best parameter;
- widths: a field per weight, whose width follows from the exponent of the old weight, and 32 bits for each
  change that does not fit: a GPU can decode it;
- blocks of 32 weights of one exponent, of fixed width, with 5 bits for the width;
- zstd, level 3, of the XOR of old and new bits.

A module is what `fully_shard` would be called on: a layer of a transformer, and the rest. Its parameters are
cut into `--world` shards, each of which is coded by itself.

    python benchmarks/exact_steps.py [--steps 300] [--every 5] [--world 4] [--only SETTING…] [--json PATH]
"""

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from gradwire_lab.workloads.base import Workload
from gradwire_lab.workloads.catalogue import workload
from gradwire_lab.workloads.models import CharGPT

Bits = NDArray[np.uint16]


class Setting(NamedTuple):
    """A model and how it is trained."""

    model: str
    optimizer: str
    rate: float
    schedule: str = "warm-up and cosine"


SETTINGS = {
    "chargpt AdamW 1e-3": Setting("chargpt", "AdamW", 1e-3),
    "chargpt AdamW 3e-4": Setting("chargpt", "AdamW", 3e-4),
    "chargpt AdamW 1e-4": Setting("chargpt", "AdamW", 1e-4),
    "chargpt AdamW 1e-5, constant": Setting("chargpt", "AdamW", 1e-5, "constant"),
    "chargpt SGD 0.05": Setting("chargpt", "SGD", 0.05),
    "chargpt Muon 2e-2": Setting("chargpt", "Muon", 2e-2),
    "convnet SGD 0.02": Setting("convnet", "SGD", 0.02),
    "convnet AdamW 1e-3": Setting("convnet", "AdamW", 1e-3),
    "19 M transformer AdamW 3e-4": Setting("large", "AdamW", 3e-4),
}


def made(setting: Setting) -> tuple[Workload, nn.Module]:
    """A workload, and the model that is trained on it."""
    if setting.model != "large":
        found = workload(setting.model)
        return found, found.model(0)
    text = workload("chargpt")
    torch.manual_seed(0)
    return text, CharGPT(int(text.describe()["vocabulary"]), 512, 6, 8, 64)


def optimizers_of(setting: Setting, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizer; Muon for matrices inside layers, with AdamW for all else."""
    parameters = dict(model.named_parameters())
    if setting.optimizer == "AdamW":
        every = parameters.values()
        return [torch.optim.AdamW(every, setting.rate, betas=(0.9, 0.95), weight_decay=0.1)]
    if setting.optimizer == "SGD":
        return [torch.optim.SGD(parameters.values(), setting.rate, momentum=0.9, weight_decay=5e-4)]
    inner = {name: each for name, each in parameters.items() if each.ndim == 2 and "layers" in name}
    others = [each for name, each in parameters.items() if name not in inner]
    muon = torch.optim.Muon(inner.values(), setting.rate, momentum=0.95, weight_decay=0.1)
    return [muon, torch.optim.AdamW(others, 1e-3, betas=(0.9, 0.95), weight_decay=0.1)]


def factor(setting: Setting, step: int, steps: int) -> float:
    """The learning rate of a step, of the largest: a tenth of the steps up, then a cosine down to a tenth."""
    if setting.schedule == "constant":
        return 1.0
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * float(np.cos(np.pi * (step - warm_up) / max(1, steps - warm_up)))


def modules_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by module, as FSDP2 would shard them: layers of a transformer, and all else."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        layer = re.match(r"layers\.\d+", name)
        found[layer.group() if layer else "the root"].append(name)
    return found


class Rounded(nn.Module):
    """`model`, computing with other weights than its own."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._call = partial(functional_call, model, weights)

    def forward(self, x: Tensor) -> Tensor:
        return self._call(x)


def trained(setting: Setting, steps: int, every: int) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Train; every so often yield the step, its loss, and the bits of each parameter before and after."""
    work, model = made(setting)
    optimizers = optimizers_of(setting, model)
    batches = work.batches(0, 1, 0)
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    for step in range(steps):
        scale = factor(setting, step, steps)
        groups = (group for each in optimizers for group in each.param_groups)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        rounded = {
            name: each + (each.bfloat16().float() - each).detach() for name, each in model.named_parameters()
        }
        loss = work.loss(Rounded(model, rounded), next(batches))
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        is_compared = step % every == every - 1
        before = bits_of(model) if is_compared else {}
        for each in optimizers:
            each.step()
        if is_compared:
            after = bits_of(model)
            yield step, loss.item(), {name: (before[name], after[name]) for name in before}


def bits_of(model: nn.Module) -> dict[str, Bits]:
    """The bits of each parameter in bfloat16."""
    return {
        name: each.detach().bfloat16().flatten().view(torch.int16).numpy().view(np.uint16).copy()
        for name, each in model.named_parameters()
    }


def zigzag(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Changes as whole numbers from 0 on: units in the last place, the sign in the lowest bit."""
    a, b = (each.view(np.int16) ^ np.where(each >> 15, 0x7FFF, 0).astype(np.int16) for each in (old, new))
    step = (b - a).astype(np.int16)
    return ((step << 1) ^ (step >> 15)).view(np.uint16).astype(np.int64)


def floor_bits(old: Bits, new: Bits) -> float:
    """Bits of the entropy of changes, given exponents."""
    joint = ((old.astype(np.int64) >> 7) & 255) << 16 | zigzag(old, new)
    pairs = np.unique(joint, return_counts=True)
    classes = np.unique(pairs[0] >> 16, return_inverse=True)[1]
    of_class = np.bincount(classes, pairs[1])[classes]
    return float((pairs[1] * np.log2(of_class / pairs[1])).sum())


def block_bits(old: Bits, new: Bits, block: int = 32) -> float:
    """Bits of blocks of one exponent, each of one width, with 5 bits for it."""
    exponents = (old >> 7) & 255
    change = zigzag(old, new)[np.argsort(exponents, kind="stable")]
    total = 0
    for count in np.bincount(exponents):
        here, change = change[:count], change[count:]
        rows = np.append(here, np.zeros(-count % block, np.int64)).reshape(-1, block)
        widths = np.ceil(np.log2(rows.max(1) + 1)) if count else np.zeros(0)
        total += int(widths.sum()) * block + 5 * len(widths)
    return float(total)


def width_bits(old: Bits, new: Bits) -> float:
    """Bits of fields whose width follows from the old weight's exponent, and 32 for a change that does not
    fit."""
    exponents = (old >> 7) & 255
    needed = np.ceil(np.log2(zigzag(old, new) + 1)).astype(np.int64)
    total = 0.0
    for each in np.unique(exponents):
        counts = np.bincount(needed[exponents == each], minlength=17)
        total += 8 + min(w * counts.sum() + 32 * counts[w + 1 :].sum() for w in range(17))
    return total


def rice_bits(values: NDArray[np.int64]) -> float:
    """Bits of Rice's code with the best parameter."""
    if not len(values):
        return 0.0
    return float(min((values >> k).sum() + len(values) * (k + 1) for k in range(16)))


def run_bits(old: Bits, new: Bits) -> float:
    """Bits of gaps and changes by class of exponents, and a byte per class."""
    exponents, change = (old >> 7) & 255, zigzag(old, new)
    total = 0.0
    for each in np.unique(exponents):
        here = change[exponents == each]
        places = np.flatnonzero(here)
        gaps = np.diff(np.append(-1, np.append(places, len(here)))) - 1
        total += 8 + min(rice_bits(here), rice_bits(gaps) + rice_bits(here[places] - 1))
    return total


def zstd_bits(old: Bits, new: Bits) -> float:
    """Bits of zstd of the XOR, both bytes of all numbers one after another."""
    planes = (old ^ new).view(np.uint8).reshape(-1, 2).T.copy()
    return 8.0 * len(zstandard.ZstdCompressor(level=3).compress(planes.tobytes()))


CODES: dict[str, Callable[[Bits, Bits], float]] = {
    "runs": run_bits,
    "widths": width_bits,
    "blocks of 32": block_bits,
    "zstd of XOR": zstd_bits,
}


def measured(setting: Setting, steps: int, every: int, world: int) -> dict[str, Any]:
    """Bits per parameter by step and module, under each code."""
    rows = []
    for step, loss, pairs in trained(setting, steps, every):
        bits: dict[str, dict[str, float]] = {}
        for module, names in modules_of(pairs).items():
            old, new = (np.concatenate([pairs[name][side] for name in names]) for side in (0, 1))
            shards = list(zip(np.array_split(old, world), np.array_split(new, world), strict=True))
            of_codes = {name: sum(code(*each) for each in shards) for name, code in CODES.items()}
            bits[module] = {"parameters": len(old), "floor": floor_bits(old, new), **of_codes}
        rows.append({"step": step, "loss": loss, "bits": bits})
    return {"setting": setting._asdict(), "rows": rows}


def per_parameter(bits: Iterable[dict[str, float]]) -> dict[str, float]:
    """Bits per parameter under each code, of some modules together."""
    every = list(bits)
    total = sum(each["parameters"] for each in every)
    return {name: sum(each[name] for each in every) / total for name in ("floor", *CODES)}


def line(head: str, bits: dict[str, float]) -> str:
    """A row of a table."""
    return f"| {head} | " + " | ".join(f"{bits[name]:.2f}" for name in ("floor", *CODES)) + " |"


def tables(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Bits per parameter and step: of whole runs, over training, and by module."""
    columns = ("floor", *CODES)
    for title, parts in (
        ("mean of the run", lambda rows: {"": rows}),
        ("over training", _by_time),
    ):
        yield f"\n| {title} | " + " | ".join(columns) + " |"
        yield "|---" * (len(columns) + 1) + "|"
        for name, run in runs.items():
            for head, rows in parts(run["rows"]).items():
                every = [per_parameter(row["bits"].values()) for row in rows]
                yield line(f"{name}{head}", {code: fmean(each[code] for each in every) for code in columns})
    yield "\n| by module | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, run in runs.items():
        for module in run["rows"][0]["bits"]:
            every = [per_parameter([row["bits"][module]]) for row in run["rows"]]
            yield line(f"{name}, {module}", {code: fmean(each[code] for each in every) for code in columns})


def _by_time(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of four quarters of a run, by the steps at which they begin and end."""
    quarters = [rows[len(rows) * i // 4 : len(rows) * (i + 1) // 4] for i in range(4)]
    return {f", steps to {each[-1]['step'] + 1}": each for each in quarters if each}


def main() -> None:
    """Train, compare, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from one comparison to the next")
    parser.add_argument("--world", type=int, default=4, help="shards of a module")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = {}
    for name in arguments.only:
        start = time.perf_counter()
        steps = arguments.steps if SETTINGS[name].model != "large" else arguments.steps // 5
        runs[name] = measured(SETTINGS[name], steps, arguments.every, arguments.world)
        losses = [row["loss"] for row in runs[name]["rows"]]
        took_s = time.perf_counter() - start
        print(f"{name}: {steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, {took_s:.0f} s", flush=True)
    print(*tables(runs), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
