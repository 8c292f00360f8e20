"""Scenes of what people do between `backward()` and `step()`, beside plain training where there is one."""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
import pickle
import re
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.environment import TIMED_EVERY
from gradwire.errors import GradwireError, RanksDisagree
from gradwire.integrations.dcp import WireState
from tests.support.models import SHAPE, batch, digest, optimizer_of, perceptron
from tests.support.ranks import FOLDER
from tests.support.states import own_state
from tests.support.world import lose_groups

Loop = tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]


def attached(recipe: str, source: str = "ddp", **options: Any) -> Loop:
    """A model, attached with or without a wrapper, with plain SGD."""
    model = perceptron()
    if source == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    else:
        options["replicas"] = dist.group.WORLD
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, **options)


def backward(model: nn.Module, number: int, factor: float = 1.0) -> Tensor:
    """The loss of one batch, and its gradients; the batch of one rank alone is `factor` times too large."""
    inputs, targets = batch(number)
    if dist.get_rank() == 1:
        inputs, targets = inputs * factor, targets * factor
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def memory_of(wire: gradwire.Wire) -> dict[str, Tensor]:
    """What is remembered, by parameter."""
    return dict(own_state(wire)["memory"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def told(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Warnings, and what the log of gradwire says from a `level` on."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, log = Lines(level), logging.getLogger("gradwire")
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    lines += [str(each.message) for each in caught]


# -- what a run tells

TELLING = 72
"""Steps of a run that tells: twice as many as norms are weighed in, and enough to know the link."""

TELLING_RECIPES = ("dense", "topk(ratio=0.1)", "int4")


def tells(recipe: str, timed_every: int = 1) -> dict[str, Any]:
    """Which fields of report and metrics a run knows, and its log, after one step of each kind that fails.

    One step in `timed_every` is timed; the last ones are not, unless all are.

    Numbers that vary from run to run are left out, and so are what is said of compiling, and fields that
    depend on what the link did.
    """
    with told(logging.INFO) as lines, mock.patch.dict(os.environ, {TIMED_EVERY: str(timed_every)}):
        model, optimizer, wire = attached(recipe)
        for number in range(TELLING):
            optimizer.zero_grad()
            backward(model, number, math.nan if number == BAD else 1.0)
            if number not in (BAD, BAD + 2):  # as a scaler skips the one, and a user leaves out the other
                optimizer.step()
    report, metrics = wire.report().as_dict(), wire.metrics()
    backward(model, TELLING)
    timed = wire.report().timeline != report["timeline"]
    unknown = {name for name, each in report.items() if each is None or each == [] or each == ()}
    return {
        "report": sorted(report),
        "unknown": sorted(unknown - {"link", "link_changes", "health"}),
        "metrics": sorted(each.removeprefix("gradwire/") for each in metrics if "/link_" not in each),
        "apart": sorted(
            name for name, each in reported(report).items() if metrics[f"gradwire/{name}"] != each
        ),
        "timeline": sorted({str(span["what"]) for span in report["timeline"]}),
        "bytes": report["metered_bytes_per_step"] == report["wire_bytes_per_step"],
        "timed": timed,
        "log": [re.sub(r"[0-9][0-9.]*(dev[0-9]+)?", "N", line) for line in lines if "compiling" not in line],
    }


def reported(report: dict[str, Any]) -> dict[str, float]:
    """Metrics of a run in which one step was not finite and one was left out, as its report has them.

    Of times the report has medians, and metrics have means.
    """
    computing_s, dense = report["computing_by_rank_s"], report["dense_bytes_per_step"]
    found = {
        "step": report["step"],
        "skipped_steps": 1,
        "dropped_steps": 1,
        "health_warnings": len(report["health"]),
        "bytes_sent": report["wire_bytes_per_step"],
        "bytes_sent_mean": report["metered_bytes_per_step"],
        "dense_bytes": dense,
        "ratio": report["wire_bytes_per_step"] / dense,
        "ratio_mean": report["metered_bytes_per_step"] / dense,
        "slowest_rank": computing_s.index(max(computing_s)),
        "slowest_computing_s": max(computing_s),
        "median_computing_s": median(computing_s),
        "memory_bytes": report["memory_bytes"],
        "compile_s": report["compile_s"],
    }
    link = report["link"] or {"alpha_s": 0.0, "beta_s": 0.0}
    found |= {"link_bytes_per_s": 1.0 / link["beta_s"]} if link["beta_s"] else {}
    return found | ({"link_latency_s": link["alpha_s"]} if link["alpha_s"] else {})


# -- a step that is left out

BAD = 4
STEPS = 8


def clear(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """Go on with the next batch."""
    optimizer.zero_grad()


def clear_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """As before torch 2."""
    optimizer.zero_grad(set_to_none=False)


def clear_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """A step without gradients does nothing."""
    optimizer.zero_grad()
    optimizer.step()


def say_it(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """The gradients stand until the next pass; the user says that they count for nothing."""
    wire.drop_step()
    for parameter in model.parameters():
        parameter.grad = None


def flush_and_clear(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """What a flush has added is thrown away with the rest."""
    wire.flush()
    optimizer.zero_grad()


def left_out(recipe: str, source: str, leave: Callable[..., None] | None, exchanges: int = 1) -> list[Any]:
    """Train with a bad batch that is left out; without `leave` the batch never was."""
    model, optimizer, wire = attached(recipe, source)
    with told() as lines:
        for number in range(STEPS):
            if number == BAD:
                if leave is not None:
                    for more in range(exchanges):
                        backward(model, 100 + more, 100.0)
                    leave(model, optimizer, wire)
                continue
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()
    report = wire.report()
    return [digest(model), report.step, report.dropped_steps, len(lines)]


RESUMED = (
    ("ddp", "state"),
    ("plain", "state"),
    ("ddp", "folder"),
    ("ddp", "dcp"),
    ("ddp", "mean"),
    ("ddp", "optimizer first"),
    ("ddp", "optimizer last"),
)
"""Ways to resume, by source. The optimizer has a state of its own in the last two."""


def load(wire: gradwire.Wire, way: str, folder: Path, saved: Any) -> None:
    """Load from `folder`, by the wire or with DCP, or what was `saved` in memory."""
    if way == "folder":
        wire.load(folder)
    elif way == "dcp":
        dcp.load({"wire": WireState(wire, folder)}, checkpoint_id=folder)
    else:
        wire.load_state_dict(saved)


def resumed(source: str, way: str, *, at: int, leaves_out: bool) -> list[Any]:
    """Train, resume in another model by some `way` after `at` steps, and perhaps leave the next batch out."""
    folder = Path(os.environ[FOLDER], f"resumed {source} {way} {leaves_out}")
    momentum = 0.9 if way.startswith("optimizer") else 0.0

    def made() -> Loop:
        model = perceptron()
        replicas = {} if source == "ddp" else {"replicas": dist.group.WORLD}
        if source == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        return model, optimizer, gradwire.attach(model, optimizer, "topk(ratio=0.1)", **replicas)

    model, optimizer, wire = made()
    for number in range(at):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
    if way != "never":
        parameters, of_optimizer = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        saved = wire.mean_state_dict() if way == "mean" else wire.state_dict()
        if way == "older":
            (mine,) = saved.values()
            mine.pop("stepped", None)
        wire.save(folder)
        if way == "dcp":
            dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
        model, optimizer, wire = made()
        if way == "rewound":
            backward(model, 50)
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(parameters)
        if way != "optimizer last":
            optimizer.load_state_dict(of_optimizer)
        load(wire, way, folder, saved)
        if way == "optimizer last":
            optimizer.load_state_dict(of_optimizer)
    if leaves_out:
        optimizer.zero_grad()
        backward(model, 100, 100.0)
    for number in range(at, 6):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
    return [digest(model), wire.report().step, wire.report().dropped_steps]


def resumed_beside(source: str, way: str, at: int = 3) -> list[list[Any]]:
    """A resumed run that leaves its first batch out, beside one that never got the batch."""
    return [resumed(source, way, at=at, leaves_out=each) for each in (True, False)]


LOOK, LOOKS = 4, 12
"""Steps from one look at the losses to the next, and the number of looks until a rise has been found."""
RISEN = ("state", "folder", "dcp", "mean")
"""Ways to resume after losses have begun to rise."""


def losses_that_rise(way: str) -> list[tuple[int, str]]:
    """Signs found in a run that resumes by some `way`, between two looks, one step after the rise."""
    folder = Path(os.environ[FOLDER], f"losses {way}")
    rises = (LOOKS - 2) * LOOK

    def made() -> Loop:
        model = DistributedDataParallel(perceptron())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return model, optimizer, gradwire.attach(model, optimizer, "topk(ratio=0.5)")

    with mock.patch("gradwire.control.controller.EVERY", LOOK):
        model, optimizer, wire = made()
        for number in range(LOOKS * LOOK + 1):
            if number == rises + 2 and way != "never":
                saved = wire.mean_state_dict() if way == "mean" else wire.state_dict()
                wire.save(folder)
                if way == "dcp":
                    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
                model, optimizer, wire = made()
                load(wire, way, folder, saved)
            optimizer.zero_grad()
            backward(model, number % 4)
            optimizer.step()
            wire.note_loss(1.0 + (number > rises) + 0.01 * (number % 2 + dist.get_rank()))
    return list(wire.report().health)


def kept_if_asked(recipe: str) -> list[Any]:
    """`skipped="keep"`: what the bad batch has left comes with the next step."""
    model, optimizer, wire = attached(recipe, skipped="keep")
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number)
        if number != 1:
            optimizer.step()
    return [wire.report().step, wire.report().dropped_steps]


def many_in_a_row() -> list[str]:
    """No optimizer steps."""
    model, optimizer, _wire = attached("topk(ratio=0.1)")
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    with told() as lines:
        for number in range(12):
            model.zero_grad()
            backward(model, number)
    return lines if dist.get_rank() == 0 else []


def another_optimizer(recipe: str, steps_from: int) -> list[Any]:
    """From a step on another optimizer than the one given steps; one step is left out. What waits at the end
    is told by parameter, as the sum of its magnitudes.
    """
    model, optimizer, wire = attached(recipe)
    other = torch.optim.SGD(model.parameters(), lr=0.05)
    with told() as lines:
        for number in range(STEPS):
            model.zero_grad()
            backward(model, number)
            if number != BAD:
                (optimizer if number < steps_from else other).step()
    waits = {name: float(each.abs().sum()) for name, each in memory_of(wire).items()}
    return [digest(model), waits, wire.report().step, wire.report().dropped_steps, lines]


def switches_optimizer() -> list[Any]:
    """No warning any more; what does not suit is refused on all ranks, and then nothing has changed."""
    model, optimizer, wire = attached("dgc(ratio=0.1, warmup_steps=0)")
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    other, refused = optimizer_of(model), []
    uneven = torch.optim.SGD(model.parameters(), lr=0.05 + dist.get_rank())
    foreign = optimizer_of(nn.Linear(1, 1))
    for wrong in (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), uneven, foreign):
        try:
            wire.switch_optimizer(wrong)
        except Exception as error:
            refused.append(type(error).__name__)
    stays = wire.attached.optimizers == (optimizer,)
    wire.switch_optimizer(other)
    with told() as lines:
        for number in range(3):
            other.zero_grad()
            backward(model, number)
            other.step()
        other.zero_grad()
        wire.detach()
        other.step()
        third = optimizer_of(model)
        for number in range(2):
            third.zero_grad()
            backward(model, number)
            third.step()
    momentum = [line for line in lines if "momentum is no longer applied" in line]
    return [
        stays,
        refused,
        wire.attached.optimizers == (other,),
        len(lines) - len(momentum),
        wire.report().dropped_steps,
    ]


def switched_after_detach() -> str:
    """A detached wire knows its optimizer, so that momentum is not applied twice."""
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wire = gradwire.attach(model, optimizer, "topk(ratio=0.1)")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    wire.detach()
    optimizer.step()
    try:
        wire.switch("dgc(ratio=0.1, warmup_steps=0)")
    except ValueError as error:
        return str(error)
    return ""


def left_out_after_detach() -> list[float]:
    """Losses after a detached wire's rank 1 has left out a step, as ranks of plain DDP may."""
    model, optimizer, wire = attached("topk(ratio=0.1)")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    wire.detach()
    optimizer.step()
    losses = []
    for number in range(1, 5):
        optimizer.zero_grad()
        losses.append(float(backward(model, number)))
        if number != 2 or dist.get_rank() == 0:
            optimizer.step()
    return losses


def goes_by_the_other() -> list[float]:
    """The share of a gradient that arrives where the optimizer could tell, then could not: by gcomp."""
    model, optimizer, wire = attached("gcomp")
    other = torch.optim.SGD(model.parameters(), lr=1e-12)
    shares = []
    for now in (optimizer, other):
        if now is other:
            wire.switch_optimizer(other)
        now.zero_grad()
        backward(model, 0)
        whole = torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])
        shares.append(float(whole.count_nonzero()) / whole.numel())
        now.step()
    return shares


def part_of_the_one_given() -> list[Any]:
    """The one given is around another that steps in its place, as in sharpness-aware minimization."""
    model, optimizer, wire = attached("topk(ratio=0.1)")
    inner = optimizer_of(model)
    inner.param_groups = optimizer.param_groups
    with told() as lines:
        for number in range(3):
            model.zero_grad()
            backward(model, number)
            inner.step()
    return [wire.report().dropped_steps, lines]


def ranks_differ(recipe: str, clears: bool = True) -> str:
    """One rank leaves the step out, or only makes no step yet. The group cannot go on after that."""
    model, optimizer, _wire = attached(recipe)
    try:
        for number in range(4):
            if clears or number < 3 or dist.get_rank() == 0:
                optimizer.zero_grad()
            backward(model, number)
            if number != 2 or dist.get_rank() == 0:
                optimizer.step()
    except RanksDisagree as error:
        lose_groups()
        return str(error)
    return ""


def in_each_phase_of_auto() -> list[Any]:
    """Every fifth step is left out while `auto` measures, tries and has settled."""
    model, optimizer, wire = attached("auto")
    for number in range(60):
        optimizer.zero_grad()
        backward(model, number, 100.0 if number % 5 == 4 else 1.0)
        if number % 5 != 4:
            optimizer.step()
    optimizer.zero_grad()
    wire.flush()
    return [digest(model), wire.report().dropped_steps, wire.report().step]


# -- several exchanges, several optimizers


class Gan(nn.Module):
    """A generator and a discriminator in one wrapper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.g = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, SHAPE[0]))
        self.d = nn.Sequential(nn.Linear(SHAPE[0], 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, real: Tensor | None, noise: Tensor) -> tuple[Tensor | None, Tensor]:
        """The judgement of real ones, and of generated ones; with `real` the generator is not trained."""
        made = self.g(noise)
        return (None, self.d(made)) if real is None else (self.d(real), self.d(made.detach()))


def gan(recipe: str | None) -> dict[str, Any]:
    """The ordinary loop: the generator's loss goes back through the discriminator, too."""
    ddp = DistributedDataParallel(Gan(), bucket_cap_mb=0.01, find_unused_parameters=True)
    both = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (ddp.module.d, ddp.module.g)]
    wire = None if recipe is None else gradwire.attach(ddp, both, recipe)
    kept = []
    with told() as lines:
        for number in range(6):
            real, _ = batch(number)
            noise = torch.randn(
                16, 16, generator=torch.Generator().manual_seed(dist.get_rank() * 100 + number)
            )
            for judge in (True, False):
                optimizer = both[0 if judge else 1]
                optimizer.zero_grad()
                before = {} if wire is None else _of(wire, "d.")
                true, fake = ddp(real if judge else None, noise)
                loss = -fake.mean() if true is None else (nn.functional.softplus(fake - true)).mean()
                loss.backward()
                optimizer.step()
                if wire is not None and not judge:
                    both[0].zero_grad()
                    kept.append(same(_of(wire, "d."), before))
    found = {"digest": digest(ddp), "kept": kept, "lines": lines}
    if recipe is not None:
        found["d"] = torch.cat([p.detach().flatten() for p in ddp.module.d.parameters()]).tolist()
    return found


def _of(wire: gradwire.Wire, prefix: str) -> dict[str, Tensor]:
    return {name: plane for name, plane in memory_of(wire).items() if name.startswith(prefix)}


def two_optimizers(recipe: str, every: int) -> list[Any]:
    """One steps after every pass, the other after `every` passes, of which its gradients add up."""
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    halves = list(model.module)
    first = torch.optim.SGD(halves[0].parameters(), lr=0.02)
    rest = torch.optim.SGD([*halves[2].parameters(), *halves[4].parameters()], lr=0.02)
    wire = gradwire.attach(model, [first, rest], recipe)
    total = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with told() as lines:
        for number in range(8):
            first.zero_grad()
            backward(model, number)
            first.step()
            if number % every == every - 1:
                rest.step()
                rest.zero_grad()
    # What was applied and what is unsent add up to no more than all gradients did: nothing counts twice.
    moved = {name: (start[name] - p.detach()) / 0.02 for name, p in model.module.named_parameters()}
    size = max(float(each.norm()) for each in moved.values())
    assert all(each.isfinite().all() for each in total.values())
    return [digest(model), wire.report().step, wire.report().dropped_steps, lines, round(size, 3)]


def accumulation(recipe: str) -> list[Any]:
    """Two passes without `no_sync` make one step."""
    model, optimizer, wire = attached(recipe)
    numbers = []
    for number in range(6):
        if number % 2 == 0:
            optimizer.zero_grad()
        backward(model, number)
        if number % 2 == 1:
            optimizer.step()
            numbers.append(wire.report().step)
    return numbers


def sharpness_aware(recipe: str) -> list[Any]:
    """The gradients of the first of two passes are thrown away, once they have moved the parameters."""
    model, optimizer, wire = attached(recipe)
    moved = [torch.zeros_like(p, dtype=torch.bool) for p in model.parameters()]
    for number in range(40):
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, number)
        steps = [1e-3 * p.grad for p in model.parameters()]
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter.add_(step)
        optimizer.zero_grad()
        backward(model, number)
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        for seen, parameter, old in zip(moved, model.parameters(), before, strict=True):
            seen |= (parameter.detach() - old).abs() > 1e-6
    share = min(float(seen.float().mean()) for seen in moved if seen.dim() > 1)
    return [wire.report().step, digest(model), share]


# -- how the model is called, what it returns, and which optimizer is given


class Held:
    """An output of a class of the user's own."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@dataclass(slots=True)
class Slots:
    """An output without a dictionary."""

    loss: Tensor


class Task(nn.Module):
    """Computes its own loss, and hands it over in one of several forms; the first layer may be frozen."""

    def __init__(self, form: str = "a tensor", *, frozen: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.net = perceptron()
        self.form, self.checkpointed = form, checkpointed
        self.kept: list[Tensor] = []
        next(iter(self.net.children())).requires_grad_(not frozen)

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        first, *rest = self.net.children()
        hidden = first(inputs)
        for layer in rest:
            inner = self.checkpointed and layer is not rest[-1]
            hidden = checkpoint(layer, hidden, use_reentrant=True) if inner else layer(hidden)
        loss = nn.functional.mse_loss(hidden, targets)
        if self.form == "none":
            self.kept.append(loss)
            return None
        held = {"an object": Held, "a namespace": SimpleNamespace, "slots": Slots}.get(self.form)
        return loss if held is None else held(loss=loss)


def loss_of(outputs: Any, model: nn.Module) -> Tensor:
    """The loss of a `Task`, whatever wrappers are around it."""
    if outputs is not None:
        loss: Tensor = getattr(outputs, "loss", outputs)
        return loss
    (task,) = (each for each in model.modules() if isinstance(each, Task))
    return task.kept.pop()


def bad_batch(number: int, factor: float) -> tuple[Tensor, Tensor]:
    """As for `backward` above."""
    inputs, targets = batch(number)
    scale = factor if dist.get_rank() == 1 else 1.0
    return inputs * scale, targets * scale


def call(model: nn.Module, number: int, factor: float) -> Tensor:
    return loss_of(model(*bad_batch(number, factor)), model)


def call_forward(model: nn.Module, number: int, factor: float) -> Tensor:
    """Round the hooks on the model."""
    return loss_of(model.forward(*bad_batch(number, factor)), model)


def call_twice(model: nn.Module, number: int, factor: float) -> Tensor:
    """Two forward passes before one backward pass, as of two views of a batch."""
    both = [model(*bad_batch(number, factor)), model(*bad_batch(number, factor))]
    one, other = (loss_of(each, model) for each in both)
    return one / 2 + other / 2


def call_with_penalty(model: nn.Module, number: int, factor: float) -> Tensor:
    """Gradients of gradients: a pass of `autograd.grad` comes before the backward pass."""
    loss = call(model, number, factor)
    used = [p for p in model.parameters() if p.requires_grad]
    return loss + 0.01 * sum(
        each.square().sum() for each in torch.autograd.grad(loss, used, create_graph=True)
    )


@dataclass(frozen=True)
class Case:
    """A way in which people call a model and make a step."""

    form: str = "a tensor"
    call: Callable[[nn.Module, int, float], Tensor] = call
    leave: Callable[[nn.Module, torch.optim.Optimizer, Any], None] = clear
    frozen: bool = False
    checkpointed: bool = False
    compiled: bool = False
    accumulates: bool = False
    views: bool = False
    by_part: bool = False
    around: str = ""
    like: str = ""
    """The case whose run it must equal where the bad batch never was; of its own, if it is empty."""


class Lookahead(torch.optim.Optimizer):
    """In the style of timm: torch's constructor is not run, so hooks on it never are."""

    def __init__(self, inner: torch.optim.Optimizer, *, hookable: bool) -> None:
        self._inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        self._slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self._steps = 0
        if hookable:  # as later versions of it
            self._optimizer_step_pre_hooks: Any = OrderedDict()
            self._optimizer_step_post_hooks: Any = OrderedDict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._inner.step(closure)
        self._steps += 1
        if self._steps % 3 == 0:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self._slow, parameters, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)


class Copied(torch.optim.Optimizer):
    """Around an optimizer with parameter groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.0})
        self.inner = inner

    def update(self) -> None:
        """Its own `step` is not called."""
        self.inner.step()


def optimizer_around(around: str, parameters: list[nn.Parameter]) -> Any:
    inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.5 if around else 0.0)
    if around.startswith("lookahead"):
        return Lookahead(inner, hookable=around == "lookahead")
    return Copied(inner) if around else inner


CASES: dict[str, Case] = {
    "model(x)": Case(),
    "model.forward(x)": Case(call=call_forward, like="model(x)"),
    "model.forward(x), zeroed in place": Case(call=call_forward, leave=clear_in_place, like="model(x)"),
    "an object": Case("an object", like="model(x)"),
    "a namespace": Case("a namespace", like="model(x)"),
    "none": Case("none", like="model(x)"),
    "none, zeroed in place": Case("none", leave=clear_in_place, like="model(x)"),
    "slots": Case("slots", like="model(x)"),
    "none, gradients as views": Case("none", views=True, like="model(x)"),
    "penalty": Case(call=call_with_penalty),
    "none, penalty": Case("none", call=call_with_penalty, like="penalty"),
    "none, compiled": Case("none", compiled=True, like="model(x)"),
    "frozen": Case(frozen=True),
    "none, frozen": Case("none", frozen=True, like="frozen"),
    "model.forward(x), frozen": Case(call=call_forward, frozen=True, like="frozen"),
    "checkpointed": Case(checkpointed=True),
    "none, checkpointed": Case("none", checkpointed=True, like="checkpointed"),
    "model.forward(x), checkpointed": Case(call=call_forward, checkpointed=True, like="checkpointed"),
    "twice": Case(call=call_twice),
    "none, twice": Case("none", call=call_twice, like="twice"),
    "accumulating": Case(accumulates=True),
    "none, accumulating": Case("none", accumulates=True, like="accumulating"),
    "model.forward(x), accumulating": Case(call=call_forward, accumulates=True, like="accumulating"),
    "an optimizer for each parameter": Case(by_part=True, like="model(x)"),
    "model.forward(x), an optimizer for each parameter": Case(
        call=call_forward, by_part=True, like="model(x)"
    ),
    "lookahead": Case(around="lookahead"),
    "lookahead without hooks": Case(around="lookahead without hooks", like="lookahead"),
    "around a copy": Case(around="copied"),
}
CASE_RECIPES = ("dense", "topk(ratio=0.05)")
ROWS = [
    *("model(x)", "model.forward(x)", "an object", "a namespace", "none", "slots"),
    *("lookahead", "lookahead without hooks", "around a copy"),
]
"""Cases that run with both recipes, the others with the last one."""
CALLED = [
    (case, recipe, source)
    for case in CASES
    for recipe in (CASE_RECIPES if case in ROWS else CASE_RECIPES[-1:])
    for source in ("ddp", "plain")
]


def told_apart(case: Case, recipe: str | None, source: str, *, leaves: bool) -> list[Any]:
    """Train with a bad batch that is left out, or never was. Without a recipe: DDP alone."""
    torch.manual_seed(0)
    model: nn.Module = Task(case.form, frozen=case.frozen, checkpointed=case.checkpointed)
    if source == "ddp":
        cap_mb = 25 if case.compiled else 0.01  # torch's compiler refuses small ones
        model = DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=case.views)
    given = [p for p in model.parameters() if p.requires_grad]
    parts = [[each] for each in given] if case.by_part else [given]
    optimizers = [optimizer_around(case.around, part) for part in parts]
    replicas = {} if source == "ddp" else {"replicas": dist.group.WORLD}
    with told() as lines:
        wire = None if recipe is None else gradwire.attach(model, optimizers, recipe, **replicas)
        called = torch.compile(model, backend="eager") if case.compiled else model
        quiet: Any = nullcontext if not case.accumulates else wire.no_sync if wire else model.no_sync
        for number in range(STEPS):
            if number == BAD and not leaves:
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            factor = 100.0 if number == BAD else 1.0
            if case.accumulates:
                with quiet():
                    case.call(called, number + 50, 1.0).backward()
            case.call(called, number, factor).backward()
            for optimizer in optimizers:
                if number == BAD:
                    case.leave(model, optimizer, wire)
                else:
                    getattr(optimizer, "update", optimizer.step)()
    return [digest(model), wire and wire.report().step, wire and wire.report().dropped_steps, lines]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its users have it, of which `step` is not called."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * 0.05 / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


RESTING = "local_every(interval=2)"
"""Brings zeros in every second step."""


def by_halves(recipe: str | None, source: str, form: str, *, gives_inner: bool = False) -> list[Any]:
    """Forty steps in two halves."""
    torch.manual_seed(0)
    model: nn.Module = Task(form)
    if source == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    sam = SAM(list(model.parameters()))
    replicas = {} if source == "ddp" else {"replicas": dist.group.WORLD}
    with told() as lines:
        given = sam.base if gives_inner else sam
        wire = None if recipe is None else gradwire.attach(model, given, recipe, **replicas)
        for number in range(40):
            call(model, number, 1.0).backward()
            sam.first_step()
            call(model, number, 1.0).backward()
            sam.second_step()
    return [digest(model), wire and wire.report().step, [line for line in lines if "left out" not in line]]


def a_copy() -> list[Any]:
    """Of a model whose outputs cannot be seen: it trains by itself, and so does the module that is left."""
    model, found = Task("none"), []
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    wire = gradwire.attach(wrapped, optimizer, "topk(ratio=0.05)")
    for number in range(3):
        optimizer.zero_grad()
        call(wrapped, number, 1.0).backward()
        optimizer.step()
    step = wire.report().step
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = digest(copied)
        stepped = torch.optim.SGD(copied.parameters(), lr=0.05)
        call(copied, 3, 1.0).backward()
        stepped.step()
        found += [digest(copied) != before, wire.report().step == step]
    gone = [weakref.ref(each) for each in (wrapped, wire.attached.source)]
    parameter = weakref.ref(next(wrapped.parameters()))
    del wrapped, wire, copied, stepped
    gc.collect()
    found += [each() is None for each in gone]  # with the memory, although the parameters live on
    before = digest(model)
    optimizer.zero_grad()
    call(model, 4, 1.0).backward()
    optimizer.step()
    found.append(digest(model) != before)
    del model, optimizer
    gc.collect()
    return [*found, parameter() is None]


def inside_backward(source: str, guard_every: int) -> list[Any]:
    """One optimizer for each parameter, which steps as soon as the gradient is there."""
    model: nn.Module = perceptron()
    replicas = {} if source == "ddp" else {"replicas": dist.group.WORLD}
    if source == "ddp":
        model = DistributedDataParallel(model)
    optimizers = {each: torch.optim.SGD([each], lr=0.05) for each in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in optimizers:
        each.register_post_accumulate_grad_hook(hook)
    gradwire.attach(model, list(optimizers.values()), "int4", guard_every=guard_every, **replicas)
    raised = ""
    with told() as lines:
        try:
            for number in range(3):
                backward(model, number)
        except GradwireError as error:
            raised = str(error)
    return [lines, raised]


# -- optimizers that call `backward()` themselves, or leave steps out on the device


def closures() -> list[Any]:
    """`step(closure)` runs `backward()` inside the step."""
    model, plain = (DistributedDataParallel(perceptron()) for _ in range(2))
    made, other = (torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=4) for each in (model, plain))
    wire = gradwire.attach(model, made, "dense")

    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(model, number)

        return closure

    for number in range(4):
        made.step(closure_of(model, made, number))
        other.step(closure_of(plain, other, number))
    return [digest(model) == digest(plain), wire.report().dropped_steps]


def left_out_by_the_device() -> list[Any]:
    """A scaler finds Inf in a gradient that is not exchanged: the step is left out, and so is its memory."""
    model = DistributedDataParallel(perceptron())
    extra = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wire = gradwire.attach(model, optimizer, "topk(ratio=0.1)", scaler=scaler)
    for number in range(5):
        optimizer.zero_grad()
        inputs, targets = batch(number)
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        extra.grad = torch.full((3,), torch.inf if number == 3 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        if number == 2:
            before, parameters = memory_of(wire), digest(model)
        if number == 3:
            optimizer.zero_grad()
            kept, moved = same(memory_of(wire), before), digest(model) != parameters
    return [kept, moved, wire.report().dropped_steps, wire.report().step]


# -- calls between `backward()` and `step()`


def saved_in_between() -> list[bool]:
    """A checkpoint has the memory that belongs to the parameters as they are."""
    model, optimizer, wire = attached("topk(ratio=0.1)")
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
    before = memory_of(wire)
    optimizer.zero_grad()
    backward(model, 3)
    between, step = own_state(wire), wire.report().step
    optimizer.step()
    after = own_state(wire)
    return [same(dict(between["memory"]), before), between["step"] == 3, step == 3, after["step"] == 4]


# -- steps without an exchange, or with a part of one


def partly(how: str, guard_every: int) -> list[Any]:
    """Optimizer steps after passes that add to what was exchanged, or that look as if they did."""
    plain = how == "added, plain"
    model = perceptron() if plain else DistributedDataParallel(perceptron())
    optimizer = optimizer_of(model)
    options = {"replicas": dist.group.WORLD} if plain else {}
    wire = gradwire.attach(model, optimizer, "dense", guard_every=guard_every, **options)
    raised = ""
    with told() as lines:
        try:
            for number in range(0, 8, 2):
                optimizer.zero_grad()
                for micro in range(2):
                    inputs, targets = batch(number + micro)
                    is_local = micro == 1 if how.startswith("added") else how == "clipped" and micro == 0
                    with wire.no_sync() if is_local else nullcontext():
                        loss = nn.functional.mse_loss(model(inputs), targets)
                        if how == "flag":  # too late: DDP has read the last one in the forward pass
                            model.require_backward_grad_sync = micro == 1
                        loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        except GradwireError as error:
            raised = str(error)
    return [lines, raised]


def unseen(how: str, guard_every: int) -> list[Any]:
    """Optimizer steps, some of them with gradients that were never exchanged."""
    model = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(model)
    text = "local_every(interval=2)" if how == "local_every" else "dense"
    wire = gradwire.attach(model, optimizer, text, guard_every=guard_every)
    raised = ""
    with told() as lines:
        try:
            for number in range(4):
                optimizer.zero_grad()
                if how == "flush" and number == 2:
                    wire.flush()
                elif (how == "detach, around" and number > 2) or (how == "around" and number >= 2):
                    backward(model.module, number)
                elif how == "cast" and number >= 2:
                    model.double()
                    inputs, targets = (each.double() for each in batch(number))
                    nn.functional.mse_loss(model(inputs), targets).backward()
                elif how.startswith("detach") and number == 2:
                    wire.detach()
                else:
                    backward(model, number)
                optimizer.step()
        except GradwireError as error:
            raised = str(error)
        except ValueError as error:  # a cast is refused in the forward pass
            raised = str(error)
    return [lines, raised]


RECIPES = ("dense", "topk(ratio=0.1)")
"""Without a memory, and with one: what each recipe goes back to is `tests/laws/test_dropped.py`'s."""
WAYS: dict[str, Callable[..., None]] = {
    "clear": clear,
    "clear in place": clear_in_place,
    "clear and step": clear_and_step,
    "say it": say_it,
    "flush and clear": flush_and_clear,
}
LEFT_OUT = [
    *((RECIPES[0], "ddp", way) for way in ("clear", "say it")),
    *((RECIPES[1], source, way) for source in ("ddp", "plain") for way in WAYS),
]
"""Recipe, source and way."""

SCENES: dict[str, Callable[[], Any]] = {
    **{f"tells, {recipe}": partial(tells, recipe) for recipe in TELLING_RECIPES},
    **{f"tells, {recipe}, now and then": partial(tells, recipe, 16) for recipe in TELLING_RECIPES},
    **{
        f"{recipe}, {source}, never": partial(left_out, recipe, source, None)
        for recipe in RECIPES
        for source in ("ddp", "plain")
    },
    **{
        f"{recipe}, {source}, {way}": partial(left_out, recipe, source, WAYS[way])
        for recipe, source, way in LEFT_OUT
    },
    "topk(ratio=0.1), ddp, two exchanges": partial(left_out, RECIPES[1], "ddp", clear, 2),
    **{
        f"resumed, {source}, {way}": partial(resumed_beside, source, way)
        for source, way in (*RESUMED, ("ddp", "never"), ("ddp", "older"), ("plain", "never"))
    },
    **{f"losses, {way}": partial(losses_that_rise, way) for way in (*RISEN, "never")},
    **{f"at the start, {way}": partial(resumed_beside, "ddp", way, 0) for way in ("never", "rewound")},
    "kept if asked": partial(kept_if_asked, "topk(ratio=0.1)"),
    "many in a row": many_in_a_row,
    **{f"another optimizer, {recipe}": partial(another_optimizer, recipe, 2) for recipe in RECIPES},
    **{f"the one given, {recipe}": partial(another_optimizer, recipe, STEPS) for recipe in RECIPES},
    "switches optimizer": switches_optimizer,
    "switched after detach": switched_after_detach,
    "left out after detach": left_out_after_detach,
    "goes by the other": goes_by_the_other,
    "part of the one given": part_of_the_one_given,
    "auto": in_each_phase_of_auto,
    "gan, ddp": partial(gan, None),
    "gan, dense": partial(gan, "dense"),
    "gan, lossless": partial(gan, "gcomp(mode='lossless')"),
    "gan, gcomp": partial(gan, "gcomp"),
    "gan, topk": partial(gan, "topk(ratio=0.1)"),
    "two optimizers, dense": partial(two_optimizers, "dense", 2),
    "two optimizers, topk": partial(two_optimizers, "topk(ratio=0.1)", 2),
    "accumulation": partial(accumulation, "topk(ratio=0.1)"),
    "sharpness, dense": partial(sharpness_aware, "dense"),
    "sharpness, covap": partial(sharpness_aware, "covap(interval=2)"),
    "lbfgs": closures,
    "fused": left_out_by_the_device,
    "saved in between": saved_in_between,
    **{f"unseen, {how}": partial(unseen, how, 0) for how in ("around", "flush")},
    "unseen, local_every": partial(unseen, "local_every", 0),
    "unseen, detach, around": partial(unseen, "detach, around", 1),
    "unseen, guarded": partial(unseen, "around", 4),
    **{f"partly, {how}": partial(partly, how, 0) for how in ("flag", "added, plain", "clipped")},
    "partly, guarded": partial(partly, "flag", 4),
    **{
        f"{case}, {recipe}, {source}": partial(told_apart, CASES[case], recipe, source, leaves=True)
        for case, recipe, source in CALLED
    },
    **{
        f"never: {case}, {recipe}, {source}": partial(told_apart, CASES[case], recipe, source, leaves=False)
        for case, recipe, source in CALLED
        if not CASES[case].like
    },
    **{
        f"ddp: {case}": partial(told_apart, CASES[case], None, "ddp", leaves=True)
        for case in ROWS
        if not CASES[case].like
    },
    **{
        f"halves, {form}, {recipe}, {source}": partial(by_halves, recipe, source, form)
        for form in ("a tensor", "none")
        for recipe in CASE_RECIPES
        for source in ("ddp", "plain")
    },
    "halves, ddp": partial(by_halves, None, "ddp", "a tensor"),
    "halves, resting": partial(by_halves, RESTING, "ddp", "a tensor"),
    "halves, inner given, resting": partial(by_halves, RESTING, "ddp", "a tensor", gives_inner=True),
    **{
        f"halves, inner given, {recipe}": partial(by_halves, recipe, "ddp", "a tensor", gives_inner=True)
        for recipe in CASE_RECIPES
    },
    "a copy": a_copy,
    **{
        f"inside backward, {source}, {guard_every}": partial(inside_backward, source, guard_every)
        for guard_every in (0, 4)
        for source in ("ddp", "plain")
    },
    "ranks differ": partial(ranks_differ, "covap(interval=2)"),
    "ranks differ, accumulating": partial(ranks_differ, "covap(interval=2)", clears=False),
}
