"""Does late gradient order recipes as their final losses do, and up to where does none of it show?

Ranks in lockstep (`lockstep.py`), seeds paired with plain averages, and plain averages in which every mean is
off by one rounding beside them. Every run is a line of JSON: its losses, and of every step the norms from
which `lateness_table.py` makes statistics, lateness by the very code that the package has. A run that is in
the file already is not repeated.

    python benchmarks/lateness.py [--parts base 4 8 optimizer long] [--models …] [--seeds 0 1 2] --json PATH
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lockstep import Ranks, Setting, train
from torch import Tensor

from gradwire.exchange.compose import EveryK, Scheme
from gradwire.exchange.dense import dense
from gradwire.memory import UNSENT, Residual
from gradwire.planning.boundaries import phased_boundaries
from gradwire.recipes import Composition, register
from gradwire.unit.context import ExchangeContext
from gradwire_lab.data import load_images, load_text
from gradwire_lab.workloads.base import Parameters, Workload
from gradwire_lab.workloads.images import ImageWorkload, TrainingRecipe
from gradwire_lab.workloads.models import ConvNet, ResNet
from gradwire_lab.workloads.text import Size, TextWorkload

STEPS = {"convnet": 250, "gpt": 200, "resnet": 150}
"""Of the base point: 2 ranks, and each model's usual optimizer."""

MILD = ("bf16", "gcomp", "int8", "fp8", "int4")
BETWEEN = (
    "int4(block=4096)",
    "truncate(bits=22, feedback=True)",
    "topk(ratio=0.5)",
    "topk(ratio=0.3)",
    "leader_topk(ratio=0.5)",
    "partly(interval=2, part=3)",
)
STRONG = (
    "powersgd(rank=8)",
    "covap(interval=2)",
    "topk(ratio=0.1)",
    "covap(interval=3)",
    "leader_topk(ratio=0.05)",
    "powersgd(rank=2)",
    "acpsgd(rank=4)",
    "efsignsgd",
    "scalecom(warmup_steps=20)",
    "scalecom(warmup_steps=20, beta=0.2)",
    "topk(ratio=0.01)",
)
FORGETFUL = (
    "int4(feedback=False)",
    "truncate(bits=22)",
    "qsgd(bits=8)",
    "qsgd(bits=4)",
    "qsgd(bits=2)",
)
ROUNDED = ("rounded(1)", "rounded(2)")
"""Plain averages with every mean off by one rounding."""
FEW = (
    "int4",
    "topk(ratio=0.3)",
    "int4(block=4096)",
    "covap(interval=2)",
    "powersgd(rank=8)",
    "topk(ratio=0.1)",
    "powersgd(rank=2)",
)
LONG = ("int4", "topk(ratio=0.3)", "powersgd(rank=8)", "topk(ratio=0.1)", "powersgd(rank=2)")


@dataclass(frozen=True)
class Partly(EveryK):
    """One unit in `part` travels every I-th step, all others always: less is late than under `EveryK`."""

    part: int = 1

    def sends(self, ctx: ExchangeContext) -> bool:
        return ctx.unit % self.part != 0 or ctx.step % self.interval == 0


@register
def partly(interval: int = 2, part: int = 3) -> Composition:
    """COVAP's filter for a part of the units.

    Travels: most units whole, one in `part` in one of `interval` steps.
    Paper: none.
    Use when: to see what little lateness does.
    """
    return Composition(
        Scheme(dense(), Residual(), Partly(interval, part=part)),
        lambda sizes: phased_boundaries(
            sizes, interval=part, edges=(0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
        ),
    )


@dataclass(frozen=True)
class Altered:
    """A workload with another optimizer, or with all means off by one rounding, drawn from `rounding`."""

    inner: Workload
    named: str = ""
    rounding: int = 0

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        """With rates that suit these models."""
        optimizer: torch.optim.Optimizer
        if self.named == "adamw":
            optimizer = torch.optim.AdamW(params, 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        elif self.named == "sgd":
            optimizer = torch.optim.SGD(params, 0.05, 0.9, weight_decay=5e-4)
        else:
            optimizer = self.inner.optimizer(params)
        if self.rounding:
            random = torch.Generator().manual_seed(self.rounding)
            optimizer.register_step_pre_hook(lambda *_: off_by_one(optimizer, random))
        return optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def off_by_one(optimizer: torch.optim.Optimizer, random: torch.Generator) -> None:
    """Move every gradient by one rounding of float32, up or down."""
    for parameter in optimizer.param_groups[0]["params"]:
        up = torch.rand(parameter.shape, generator=random) < 0.5
        parameter.grad.mul_(torch.where(up, 1.0 + 2.0**-23, 1.0 - 2.0**-23))


def small_resnet(channels: int, classes: int) -> ResNet:
    """Of the demonstration's network one block of two per stage."""
    return ResNet(channels, classes, (16, 32, 64), (1, 1, 1))


@cache
def work_of(model: str) -> Workload:
    """A network of the catalogue or a smaller transformer, with batches that one core trains in time."""
    if model == "gpt":
        return TextWorkload("gpt", Size(128, 2), load_text(None, full=False), shards="iid", batch_size=6)
    build, rate, batch = {"convnet": (ConvNet, 0.02, 16), "resnet": (small_resnet, 0.05, 8)}[model]
    images = load_images(None, full=False)
    return ImageWorkload(model, TrainingRecipe(build, batch, rate), images, shards="iid", batch_size=batch)


@dataclass(frozen=True)
class Run:
    """One training."""

    model: str
    recipe: str
    seed: int
    world: int = 2
    optimizer: str = ""
    steps: int = 0
    part: str = "base"

    @property
    def length(self) -> int:
        """Steps."""
        return self.steps or STEPS[self.model]


@dataclass
class Norms:
    """What every step leaves, over all ranks; the numbers of single parameters only on average."""

    unsent: list[float] = field(default_factory=list)
    """Root of the sum over ranks of squares, by the memory's weight."""
    lost: list[float] = field(default_factory=list)
    """The same of what a recipe without memory throws away, or a coefficient below 1 will."""
    fresh: list[float] = field(default_factory=list)
    """The same of the ranks' own gradients."""
    mean_unsent: list[float] = field(default_factory=list)
    mean_fresh: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    """Of what is applied, beside the mean of gradients."""
    next_sent: list[float] = field(default_factory=list)
    next_fresh: list[float] = field(default_factory=list)
    next_unsent: list[float] = field(default_factory=list)
    """Inner products of a mean gradient with the step before: what was applied, its mean, what was left."""


class Looking:
    """Makes `Norms` of all steps, and of every parameter the squares of what is unsent and fresh."""

    def __init__(self) -> None:
        self.norms = Norms()
        self.layers: list[tuple[list[float], list[float]]] = []
        self._before: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, ranks: Ranks, gradients: Sequence[Tensor], applied: Tensor, number: int) -> None:
        """Look at a step that is over."""
        flat_buffers, norms = ranks.flat_buffers, self.norms
        memory, slots = flat_buffers[0].memory, flat_buffers[0].slots
        keeps = UNSENT in flat_buffers[0].committed
        unsent = (
            [flat_buffer.committed[UNSENT] * memory.weight for flat_buffer in flat_buffers] if keeps else []
        )
        coefficient = memory.coefficient(number + 1) if hasattr(memory, "coefficient") else 1.0
        fresh_by = squares(gradients, slots)
        unsent_by = squares(unsent, slots) if keeps else [0.0] * len(slots)
        self.layers.append((unsent_by, fresh_by))
        norms.unsent.append(sum(unsent_by) ** 0.5)
        norms.fresh.append(sum(fresh_by) ** 0.5)
        lost = (
            (1 - coefficient) * norms.unsent[-1]
            if keeps
            else sum(squares([each.x for each in flat_buffers], slots)) ** 0.5
        )
        norms.lost.append(lost)
        mean = torch.stack(list(gradients)).mean(0)
        left = torch.stack(unsent).mean(0) if keeps else torch.zeros_like(mean)
        norms.mean_unsent.append(float(left.norm()))
        norms.mean_fresh.append(float(mean.norm()))
        norms.error.append(float((applied - mean).norm()))
        if self._before is not None:
            for each, kept in zip(
                (norms.next_sent, norms.next_fresh, norms.next_unsent), self._before, strict=True
            ):
                each.append(float(mean @ kept))
        self._before = applied, mean, left


def squares(tensors: Sequence[Tensor], slots: Any) -> list[float]:
    """Sums of squares of every parameter, over ranks."""
    totals = [0.0] * len(slots)
    for tensor in tensors:
        found = torch._foreach_norm([tensor[slot.start : slot.stop] for slot in slots])
        totals = [a + float(b) ** 2 for a, b in zip(totals, found, strict=True)]
    return totals


def runs(parts: list[str], models: list[str], seeds: list[int], only: list[str]) -> Iterator[Run]:
    """All of them, all recipes of one seed before the next; of all recipes `only` some, where it says so."""
    every = ("", *ROUNDED, *MILD, *BETWEEN, *STRONG, *FORGETFUL)
    few = ("", *FEW)
    changes: dict[str, Callable[[str], dict[str, Any]]] = {
        "base": lambda _model: {},
        "long": lambda model: {"steps": 4 * STEPS[model]},
        "optimizer": lambda model: {"optimizer": "sgd" if model == "gpt" else "adamw"},
    }
    for part, seed, model in product(parts, seeds, models):
        wanted = only or {"base": every, "long": ("", *LONG)}.get(part, few)
        changed = changes[part](model) if part in changes else {"world": int(part)}
        yield from (Run(model, text, seed, part=part, **changed) for text in wanted)


def measured(run: Run) -> dict[str, Any]:
    """One line of the file."""
    text, rounding = run.recipe, 0
    if text.startswith("rounded"):
        text, rounding = "", 1 + 10 * run.seed + int(text[8])
    work = work_of(run.model)
    if run.optimizer or rounding:
        work = Altered(work, run.optimizer, rounding)
    looking, begun_s = Looking(), time.monotonic()
    outcome = train(Setting(run.model, text, run.world, 0, run.length), run.seed, work=work, look=looking)
    found: dict[str, Any] = {
        **asdict(run),
        "steps": run.length,
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    found |= {"loss": outcome.final_loss, **outcome.test}
    found["losses"] = [round(each, 5) for each in outcome.losses]
    found["norms"] = {
        name: [float(f"{x:.4g}") for x in values] for name, values in asdict(looking.norms).items()
    }
    if looking.layers:
        steps = torch.tensor(looking.layers)[len(looking.layers) // 4 :]
        late = steps[:, 0].mean(0).sqrt() / steps[:, 1].sqrt().median(0).values.clamp_min(1e-30)
        found["layers"] = [float(f"{x:.4g}") for x in late.tolist()]
    return found


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a run."""
    return tuple(line[name] for name in ("model", "recipe", "seed", "world", "optimizer", "steps"))


def read(path: Path) -> list[dict[str, Any]]:
    """All lines so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(path: Path, wanted: Iterable[Run]) -> None:
    """Run what is not there yet, and append a line after each."""
    done = {key_of(line) for line in read(path)}
    for run in wanted:
        if key_of({**asdict(run), "steps": run.length}) in done:
            continue
        line = measured(run)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(run.part, run.model, run.recipe or "plain", run.seed, line["loss"], line["seconds"], flush=True)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["base", "4", "8", "optimizer", "long"])
    parser.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=[], help="'' for plain averages; else all of a part")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record(options.json, runs(options.parts, options.models, options.seeds, options.recipes))


if __name__ == "__main__":
    main()
