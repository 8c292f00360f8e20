"""Scenes of local steps: beside an own DiLoCo, with every recipe, left out, resumed, not finite, refused."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire import recipes
from gradwire.comm import ProcessGroupComm
from gradwire.comm.groups import lent
from gradwire.step.reducer import Backward
from tests.support.called import CASES, SAM, Task, optimizer_around
from tests.support.models import batch, digest, optimizer_of, perceptron, same
from tests.support.ranks import FOLDER

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
EVERY = 4
plain_sgd: Make = partial(torch.optim.SGD, lr=1.0)


def outer(model: nn.Module, optimizer: Any, recipe: str = "diloco", **options: Any) -> gradwire.OuterWire:
    return gradwire.outer(
        model, optimizer, recipe, **{"replicas": dist.group.WORLD, "every": EVERY} | options
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def end(wires: list[gradwire.OuterWire]) -> None:
    """Land rounds that are under way, so that none still runs when the scene has ended."""
    for wire in wires:
        wire.detach()


def values(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def shared(wire: gradwire.OuterWire, model: nn.Module) -> list[Tensor]:
    with wire.shared_parameters():
        return values(model)


def from_all(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def equal_on_all(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> bool:
    return all(torch.equal(each, here) for here in tensors for each in from_all(here, group))


def follows_attach() -> dict[str, Any]:
    """A round after each step, which averages parameters: the mean of gradients, but for roundings."""
    one, other = perceptron(1), perceptron(1)
    mine, theirs = optimizer_of(one), optimizer_of(other)
    gradwire.attach(other, theirs, "dense", replicas=dist.group.WORLD)
    outer(one, mine, "dense", every=1, outer=plain_sgd)
    apart = []
    for step in range(8):
        steps(one, mine, range(step, step + 1))
        steps(other, theirs, range(step, step + 1))
        errors = [float((a - b).abs().max()) for a, b in zip(values(one), values(other), strict=True)]
        apart.append(max(errors))
    largest = max(float(each.abs().max()) for each in values(one))
    return {"apart": apart, "rounding": torch.finfo(torch.float32).eps / 2 * largest, "digest": digest(one)}


class OwnDiLoCo:
    """DiLoCo by the paper's formulas, with torch's own collectives; a round's result lands `delay` later."""

    def __init__(self, model: nn.Module, delay: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.parameters, self.delay, self.group = list(model.parameters()), delay, group
        self.shared = values(model)
        self.momentum = [torch.zeros_like(each) for each in self.shared]
        self.sent: list[Tensor] = []
        self.count = 0

    @torch.no_grad()
    def after_step(self) -> None:
        self.count += 1
        if self.sent and self.count % EVERY == self.delay:
            self.land()
        if self.count % EVERY == 0:
            self.sent = [each.clone() for each in self.parameters]
            if self.delay == 0:
                self.land()

    def land(self) -> None:
        for parameter, start, m, sent in zip(
            self.parameters, self.shared, self.momentum, self.sent, strict=True
        ):
            delta = torch.stack(from_all(start - sent, self.group)).mean(0)
            m.mul_(0.9).add_(delta)
            start.sub_(0.7 * (delta + 0.9 * m))
            parameter.add_(start - sent)
        self.sent = []


def beside_own(delay: int) -> dict[str, Any]:
    """Five rounds of both; how far apart, relative to how far both have gone."""
    one, other = perceptron(2), perceptron(2)
    begin = values(one)
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (one, other))
    wire = outer(one, mine, delay=delay)
    own = OwnDiLoCo(other, delay)
    for step in range(5 * EVERY + delay):
        steps(one, mine, range(step, step + 1))
        steps(other, theirs, range(step, step + 1))
        own.after_step()
    gone = torch.cat([(a - b).flatten() for a, b in zip(values(one), begin, strict=True)]).norm()
    apart = [(a - b).flatten() for a, b in zip(values(one), values(other), strict=True)]
    apart += [(a - b).flatten() for a, b in zip(shared(wire, one), own.shared, strict=True)]
    return {"relative": float(torch.cat(apart).norm() / gone), "rounds": wire.report().step}


def another_recipe() -> dict[str, Any]:
    """Two rounds of `dense`, which sends all of Δ, beside those of DiLoCo: own and shared parameters."""
    found = []
    for recipe in ("dense", "diloco"):
        model = perceptron(2)
        optimizer = optimizer_of(model)
        wire = outer(model, optimizer, recipe)
        steps(model, optimizer, range(2 * EVERY))
        found.append([*values(model), *shared(wire, model)])
    return {"same": all(map(torch.equal, *found)), "rounds": wire.report().step}


REFUSED = {"auto", "flexible", "mergecomp"}
FIXED = {
    "covap": "covap(interval=2)",
    "topk": "topk(ratio=0.1)",
    "gcomp": "gcomp(mode='lossless')",
    "local_every": "local_every(interval=2)",
    "dgc": "dgc(momentum=0.9, warmup_steps=0)",
    "scalecom": "scalecom(warmup_steps=0)",
}


def with_every_recipe() -> dict[str, Any]:
    """Whether θ₀ is the same bits after each of three rounds, and moves; or why it was refused."""
    found: dict[str, Any] = {}
    for name in recipes.names():
        if name == "sparseloco":  # of its own tests
            continue
        model = perceptron(3)
        optimizer = optimizer_of(model)
        make = plain_sgd if name in ("dgc", "signum") else None
        try:
            wire = outer(model, optimizer, FIXED.get(name, name), every=2, outer=make)
        except ValueError as error:
            found[name] = str(error)
            continue
        seen, alike = [shared(wire, model)], True
        for round_ in range(3):
            steps(model, optimizer, range(2 * round_, 2 * round_ + 2))
            seen.append(shared(wire, model))
            alike &= equal_on_all(seen[-1]) and same(seen[-1], values(model))
        found[name] = {"alike": alike, "moves": not same(seen[0], seen[-1])}
    return found


def conservation() -> dict[str, Any]:
    """What came over six rounds, beside what was applied and what is left; per element, and the bound."""
    model = perceptron(4)
    optimizer = optimizer_of(model)
    before: list[Tensor] = []

    def note(*_: Any) -> None:
        before[:] = values(model)

    handle = optimizer.register_step_post_hook(note)
    wire = outer(model, optimizer, "topk(ratio=0.05)", outer=plain_sgd)
    start = shared(wire, model)
    came = [torch.zeros_like(each, dtype=torch.float64) for each in start]
    last, size = start, 0.0
    for round_ in range(6):
        steps(model, optimizer, range(EVERY * round_, EVERY * (round_ + 1)))
        for total, theta0, theta in zip(came, last, before, strict=True):
            total += torch.stack(from_all((theta0 - theta).double())).mean(0)
            size = max(size, float(theta0.abs().max()))
        last = shared(wire, model)
    left = next(iter(wire.state_dict().values()))["memory"]
    errors = []
    for (name, _), total, first, end in zip(model.named_parameters(), came, start, last, strict=True):
        rest = torch.stack(from_all(left[name].double())).mean(0) if name in left else torch.zeros(())
        errors.append(float((total - (first.double() - end.double()) - rest).abs().max()))
    rounding = size * torch.finfo(torch.float32).eps / 2
    handle.remove()
    return {"error": max(errors), "unit": rounding, "remembers": len(left), "units": wire.report().units}


def at_rest(delay: int) -> dict[str, Any]:
    """16-bit parameters that learn for two rounds, and then rest: θ₀ does not move by what rounding did."""
    model = perceptron(5).bfloat16()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco", outer=partial(torch.optim.SGD, lr=0.7), delay=delay)
    steps(model, optimizer, range(2 * EVERY))
    optimizer.param_groups[0]["lr"] = 0.0
    # One more round brings what was learned before the rest; a delayed one lands in the next.
    steps(model, optimizer, range(2 * EVERY, 3 * EVERY + delay))
    kept = [each.clone() for each in theta0(wire)]
    steps(model, optimizer, range(3 * EVERY, 6 * EVERY))
    fits = all(torch.equal(each, each.bfloat16().float()) for each in kept)
    return {"stays": same(kept, theta0(wire)), "is rounded": not fits, "alike": equal_on_all(values(model))}


def theta0(wire: gradwire.OuterWire) -> list[Tensor]:
    groups = wire.outer_optimizer.param_groups
    return [each.detach() for group in groups for each in group["params"]]


def meeting() -> dict[str, Any]:
    """With a delay, replicas that learn nothing after a round left are equal once it has landed."""
    model = perceptron(6)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.1)", delay=2)
    steps(model, optimizer, range(2 * EVERY))
    apart = equal_on_all(values(model))
    optimizer.param_groups[0]["lr"] = 0.0
    steps(model, optimizer, range(2 * EVERY, 2 * EVERY + 1))
    still = equal_on_all(values(model))
    steps(model, optimizer, range(2 * EVERY + 1, 2 * EVERY + 2))
    return {
        "before": apart,
        "still": still,
        "after": equal_on_all(values(model)),
        "shared": same(values(model), shared(wire, model)),
    }


class Normed(nn.Module):
    """BatchNorm, a frozen layer, and a mask with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.frozen, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add_(1 + dist.get_rank())
        hidden = torch.tanh(self.frozen(self.norm(self.body(inputs))))
        return self.head(hidden) + self.mask[0]


def buffers() -> dict[str, Any]:
    """Statistics become their mean; integers and what is frozen stay."""
    torch.manual_seed(7 + dist.get_rank())
    model = Normed()
    optimizer = optimizer_of(model)
    own: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: own.append(model.norm.running_var.clone()))
    wire = outer(model, optimizer, "topk(ratio=0.1)")
    frozen = values(model.frozen)
    steps(model, optimizer, range(EVERY))
    mean = torch.stack(from_all(own[-1])).mean(0)
    handle.remove()
    return {
        "error": float((model.norm.running_var - mean).abs().max()),
        "apart": not torch.equal(own[-1], mean),
        "seen": int(model.seen),
        "frozen": same(frozen, values(model.frozen)) and equal_on_all(frozen),
        "mask": model.mask.tolist() == [0.0, -torch.inf],
        "alike": equal_on_all([*values(model), model.norm.running_mean, model.norm.running_var]),
        "rounds": wire.report().step,
    }


State = dict[str, Tensor]
Way = Callable[[nn.Module, State], Any]


def copied(state: State) -> State:
    return {name: each.clone() for name, each in state.items()}


def load_all(model: nn.Module, state: State) -> None:
    model.load_state_dict(copied(state))


def load_compiled(model: nn.Module, state: State) -> None:
    compiled = torch.compile(model, backend="eager")
    compiled.load_state_dict({f"_orig_mod.{name}": each for name, each in copied(state).items()})


def load_parts(model: nn.Module, state: State) -> None:
    for name, part in model.named_children():
        inside = {key.removeprefix(f"{name}."): each for key, each in state.items() if key.startswith(name)}
        part.load_state_dict(copied(inside))


def load_twice(model: nn.Module, state: State) -> None:
    model.load_state_dict({name: torch.zeros_like(each) for name, each in state.items()})
    model.load_state_dict(copied(state))


def stored(state: State) -> Path:
    """A checkpoint of DCP: a collective."""
    folder = Path(os.environ[FOLDER]) / f"dcp-{digest_of(state)}"
    is_new = not folder.exists()
    dist.barrier()  # all have looked
    if is_new:
        dcp.save({"model": copied(state)}, checkpoint_id=folder)
        dist.barrier()
    return folder


def digest_of(state: State) -> str:
    return "-".join(f"{len(name)}{tuple(each.shape)}" for name, each in state.items())[:100]


def load_by_dcp(model: nn.Module, state: State) -> None:
    """DCP writes into the parameters themselves, and then loads them into themselves."""
    dcp.load({"model": model}, checkpoint_id=stored(state))


def load_by_setting(model: nn.Module, state: State) -> None:
    set_model_state_dict(model, copied(state))  # type: ignore[arg-type]


def rested(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    """Steps that learn nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(model, optimizer, range(first, first + count))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def loaded(way: Way, recipe: str, delay: int) -> dict[str, Any]:
    """In the middle of a round, where one with a `delay` is under way. Nothing is learned for two rounds."""
    model, state = model_and_state(24)[0], copied(model_and_state(25)[1])
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, recipe, delay=delay)
    steps(model, optimizer, range(2 * EVERY + 1))
    way(model, state)
    target = [state[name] for name, _ in model.named_parameters()]
    shown = True
    if delay == 0:  # with a delay training goes on first
        memory = state_of(wire)["memory"].values()
        shown = same(shared(wire, model), target) and not any(bool(each.any()) for each in memory)
    rested(model, optimizer, 2 * EVERY + 1, 2 * EVERY + delay)
    found = {
        "shown": shown,
        "stays": same(values(model), target) and same(shared(wire, model), target),
    }
    steps(model, optimizer, range(5 * EVERY, 7 * EVERY))
    wire.detach()
    return found | {"learns": not same(values(model), target), "alike": equal_on_all(values(model))}


def loaded_apart(which: str) -> dict[str, Any]:
    """Rank 1 loads alone, or something else than rank 0; then all load the same."""
    model = perceptron(26)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "int4", delay=1)
    steps(model, optimizer, range(EVERY + 2))
    rank = dist.get_rank()
    if which != "one" or rank == 1:
        model.load_state_dict(perceptron(27 + rank).state_dict())
    raised = []
    for step in range(EVERY + 2, 3 * EVERY + 2):
        try:
            steps(model, optimizer, range(step, step + 1))
        except gradwire.RanksDisagree as error:
            raised.append(f"{wire.attempts}: {error}")
    try:
        wire.detach()
        ended = ""
    except gradwire.RanksDisagree as error:
        ended = str(error)
    model.load_state_dict(perceptron(29).state_dict())
    steps(model, optimizer, range(50, 50 + 2 * EVERY))
    return {"raised": raised, "ended": ended, "alike": equal_on_all(theta0(wire))}


def loaded_around_a_landing() -> dict[str, Any]:
    """Both load the same part: rank 0 while a round is under way, rank 1 when it has landed."""
    model = perceptron(26)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "dense", delay=1)
    part = perceptron(27)[0].state_dict()  # type: ignore[index]
    raised = ""
    for step in range(2 * EVERY + 1):
        if step == EVERY + dist.get_rank():
            model[0].load_state_dict(part)  # type: ignore[index]
        try:
            steps(model, optimizer, range(step, step + 1))
        except gradwire.RanksDisagree as error:
            raised = f"{wire.attempts}: {error}"
    model.load_state_dict(perceptron(29).state_dict())
    steps(model, optimizer, range(50, 50 + 2 * EVERY))
    alike = equal_on_all(theta0(wire))
    end([wire])
    return {"raised": raised, "alike": alike}


def loading_nothing(delay: int) -> dict[str, Any]:
    """Loads that bring back the values that were there: a run goes on as one without them, bit for bit."""

    def run(at: Callable[[nn.Module], None]) -> list[Tensor]:
        model, optimizer, wire = model_and_wire("topk(ratio=0.1)", delay)
        steps(model, optimizer, range(EVERY + 1))
        at(model)
        steps(model, optimizer, range(EVERY + 1, 3 * EVERY))
        trained = [*values(model), *(each.clone() for each in theta0(wire))]
        end([wire])
        return trained

    def again(model: nn.Module) -> None:
        load_all(model, model.state_dict())

    def swapped(model: nn.Module) -> None:
        mine = copied(model.state_dict())
        model.load_state_dict(model_and_state()[1])
        model.load_state_dict(mine)

    usual = run(lambda _model: None)
    return {"again": same(usual, run(again)), "swapped": same(usual, run(swapped))}


def model_and_state(seed: int = 30) -> tuple[nn.Module, State]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))
    return model, model.state_dict()


def resumed_with_the_model(delay: int, first: str) -> dict[str, Any]:
    """The user loads each replica's model, too, before the wire or after it."""
    folder = Path(os.environ[FOLDER]) / f"with-model-{delay}-{first}"
    model, optimizer, wire = model_and_wire("topk(ratio=0.1)", delay)
    steps(model, optimizer, range(EVERY + 1))
    wire.save(folder)
    mine = copied(model.state_dict())
    steps(model, optimizer, range(EVERY + 1, 4 * EVERY))
    again, theirs, other = model_and_wire("topk(ratio=0.1)", delay)
    steps(again, theirs, range(3))
    if first == "model":
        again.load_state_dict(mine)
    other.load(folder)
    if first == "wire":
        again.load_state_dict(mine)
    steps(again, theirs, range(EVERY + 1, 4 * EVERY))
    found = {"same": same([*values(model), *theta0(wire)], [*values(again), *theta0(other)])}
    end([wire, other])
    return found


def saved_after_loading() -> dict[str, Any]:
    """A run that is saved between a load and the next step begins from what was loaded, on all ranks. Shared
    parameters that are shown there are those that were loaded.
    """
    folder = Path(os.environ[FOLDER]) / "after-loading"
    model, optimizer, wire = model_and_wire("diloco", 0)
    steps(model, optimizer, range(EVERY + 1))
    state = copied(model_and_state()[1])
    model.load_state_dict(state)
    wire.save(folder)
    again, _theirs, other = model_and_wire("diloco", 0)
    other.load(folder)
    target = [state[name] for name, _ in again.named_parameters()]
    found = {"theta": same(values(again), target), "shared": same(shared(other, again), target)}
    model.load_state_dict({name: 0.5 * each for name, each in state.items()})
    return found | {"shown": same(shared(wire, model), [0.5 * each for each in target])}


def saved_after_loading_alone() -> dict[str, Any]:
    """Rank 1 loads alone, and both save before the round that would tell: the resumed round tells."""
    folder = Path(os.environ[FOLDER]) / "after-loading-alone"
    model, optimizer, wire = model_and_wire("diloco", 0)
    steps(model, optimizer, range(EVERY + 1))
    state = model_and_state()[1]
    if dist.get_rank() == 1:
        model.load_state_dict(copied(state))
    wire.save(folder)
    again, theirs, other = model_and_wire("diloco", 0)
    other.load(folder)
    raised = ""
    try:
        steps(again, theirs, range(EVERY + 1, 2 * EVERY))
    except gradwire.RanksDisagree as error:
        raised = str(error)
    for each in (model, again):
        each.load_state_dict(copied(state))
    end([wire, other])
    return {"raised": raised, "alike": equal_on_all(values(again))}


def load_refused() -> dict[str, Any]:
    model = perceptron(31)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer)
    steps(model, optimizer, range(2))
    before, found = values(model), {}
    try:
        model.load_state_dict(copied(model.state_dict()), assign=True)
    except ValueError as error:
        found["assign"] = str(error)
    with wire.shared_parameters():
        try:
            model.load_state_dict(copied(model.state_dict()))
        except gradwire.GradwireError as error:
            found["inside"] = str(error)
    found["same"] = same(before, values(model))
    return found


def copies_load() -> dict[str, Any]:
    """A copy, or one that was pickled, has no hook: what is loaded into it changes nothing here."""
    model = perceptron(32)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer)
    steps(model, optimizer, range(2))
    at_start = shared(wire, model)
    copies = [deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        each.load_state_dict(perceptron(33).state_dict())
        each(batch(0)[0])
    steps(model, optimizer, range(2, 3))
    return {
        "stays": same(at_start, shared(wire, model)),
        "hooks": [sum(len(part._load_state_dict_pre_hooks) for part in each.modules()) for each in copies],
    }


def edited() -> dict[str, Any]:
    """The warnings of runs in which something is written between two steps, or nothing is."""

    def said(change: Callable[[int, nn.Module], Any], parts: int = 1) -> list[str]:
        model = perceptron(34)
        halves = [model] if parts == 1 else [model[:2], model[2:]]  # type: ignore[index]
        optimizers = [optimizer_of(each) for each in halves]
        wire = outer(model, optimizers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2 * EVERY + 1):
                model.zero_grad()
                for micro in range(2):
                    loss_of(model, 2 * step + micro).backward()
                for each in optimizers:
                    each.step()
                with wire.shared_parameters(), torch.no_grad():
                    model(batch(0)[0])
                change(step, model)
        return [str(each.message) for each in caught if "parameters of this model were" in str(each.message)]

    @torch.no_grad()
    def by_hand(step: int, model: nn.Module) -> None:
        if step in (2, 4):
            next(model.parameters()).add_(0.01)

    @torch.no_grad()
    def swap(step: int, model: nn.Module) -> None:
        mine = values(model)
        for each in model.parameters():
            each.mul_(0.5)
        for each, value_ in zip(model.parameters(), mine, strict=True):
            each.copy_(value_)

    def load(step: int, model: nn.Module) -> None:
        if step == 3:
            load_all(model, perceptron(35).state_dict())

    return {
        "nothing": said(lambda *_: None),
        "several": said(lambda *_: None, parts=2),
        "loaded": said(load),
        "by hand": said(by_hand),
        "swapped": said(swap),
    }


class Seen(nn.Module):
    """A maximum from -inf on, a mean that is NaN until used, numbers by channel, and a table that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((), -torch.inf))
        self.register_buffer("mean", torch.full((), torch.nan))
        self.register_buffer("by_channel", torch.empty(0))
        self.register_buffer("table", torch.ones(1))

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, inputs.max()))
        self.mean.copy_(inputs.mean())
        self.by_channel.resize_(inputs.shape[1]).copy_(inputs.mean(0))
        self.table = torch.ones(len(self.table) + 1)  # a new tensor in its place
        return inputs


class Observed(nn.Module):
    """A perceptron, and what looks at it; `on` says whether that runs."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.body, self.on = perceptron(22), on
        looks = [MinMaxObserver(), MovingAverageMinMaxObserver(), PerChannelMinMaxObserver(), Seen()]
        self.looks = nn.ModuleList(looks if on else [])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body[:2](inputs)  # type: ignore[index]
        for each in self.looks if self.on else ():
            each(hidden.detach())
        out = self.body[2:](hidden)  # type: ignore[index]
        assert isinstance(out, Tensor)
        return out

    def seen(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.looks.named_buffers()}


def same_buffers(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit, where NaN is NaN."""
    return left.keys() == right.keys() and all(
        each.shape == right[name].shape and torch.equal(each.nan_to_num(7.0), right[name].nan_to_num(7.0))
        for name, each in left.items()
    )


def observed(recipe: str, delay: int) -> dict[str, Any]:
    """Beside a model without those buffers; saved in the middle of the second round, and resumed."""
    folder = Path(os.environ[FOLDER]) / f"observed-{recipe}-{delay}"

    def built(on: bool) -> tuple[Observed, torch.optim.Optimizer, gradwire.OuterWire]:
        model = Observed(on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, outer(model, optimizer, recipe, delay=delay)

    (model, optimizer, wire), (plain, theirs, _other) = built(True), built(False)
    steps(plain, theirs, range(4 * EVERY + delay))
    steps(model, optimizer, range(EVERY + 1))
    wire.save(folder)
    steps(model, optimizer, range(EVERY + 1, 4 * EVERY + delay))
    again, their_optimizer, resumed_wire = built(True)
    again(batch(0)[0])  # shapes of its own
    resumed_wire.load(folder)
    steps(again, their_optimizer, range(EVERY + 1, 4 * EVERY + delay))
    with wire.shared_parameters():
        shown = model.seen()
    return {
        "as without": same(values(model), values(plain)),
        "alike": equal_on_all(list(model.seen().values())),
        "shown": all(bool(each.isfinite().all()) for each in shown.values()),
        "resumed": same(values(model), values(again)) and same_buffers(model.seen(), again.seen()),
    }


def observed_by_some() -> dict[str, Any]:
    """Only rank 0 looks for two rounds, and so has other shapes: each keeps its own. Then both do."""
    model = Observed(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = outer(model, optimizer)
    model.on = dist.get_rank() == 0
    steps(model, optimizer, range(2 * EVERY))
    sizes = [each.numel() for name, each in model.seen().items() if name.endswith("by_channel")]
    largest = float(model.seen()["3.largest"])
    model.on = True
    steps(model, optimizer, range(2 * EVERY, 4 * EVERY))
    last: list[dict[str, Tensor]] = []
    handle = optimizer.register_step_pre_hook(lambda *_: last.append(model.seen()))
    steps(model, optimizer, range(4 * EVERY, 5 * EVERY))
    handle.remove()
    mean = torch.stack(from_all(last[-1]["3.by_channel"])).mean(0)
    return {
        "sizes": sizes,
        "largest": largest,
        "error": float((model.seen()["3.by_channel"] - mean).abs().max()),
        "apart": not equal_on_all([last[-1]["3.by_channel"]]),
        "alike": equal_on_all([*values(model), model.seen()["3.by_channel"]]),
        "rounds": wire.report().step,
    }


def statistics_not_finite() -> dict[str, Any]:
    """BatchNorm's variance is NaN on rank 1: it takes rank 0's, and what it has learned counts."""
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))
    optimizer, norm = optimizer_of(model), model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(norm.running_var, Tensor)
    last: list[list[Tensor]] = []

    def spoil(*_: Any) -> None:
        if dist.get_rank() == 1:
            norm.running_var.fill_(torch.nan)
        last.append([norm.running_var.clone(), *values(model)])

    handle = optimizer.register_step_post_hook(spoil)  # before the hook in which the round comes
    wire = outer(model, optimizer, outer=plain_sgd)
    steps(model, optimizer, range(EVERY))
    first, *learned = last[-1]
    dist.broadcast(first, 0)
    means = [torch.stack(from_all(each)).mean(0) for each in learned]
    handle.remove()
    return {
        "theirs": torch.equal(norm.running_var, first),
        "error": max(float((a - b).abs().max()) for a, b in zip(means, values(model), strict=True)),
        "alike": equal_on_all(values(model)),
        "rounds": wire.report().step,
    }


def model_and_wire(recipe: str, delay: int) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, outer(model, optimizer, recipe, delay=delay)


def resumed(recipe: str, delay: int, at: int, spoilt: int = -1) -> dict[str, Any]:
    """A run that is saved after `at` steps, and one that goes on from there, beside one that never stops.

    Before the step `spoilt`, a parameter of rank 1 becomes NaN.
    """
    folder = Path(os.environ[FOLDER]) / f"saved-{recipe}-{delay}-{at}-{spoilt}"
    model, optimizer, wire = model_and_wire(recipe, delay)
    for step in range(at):
        if step == spoilt and dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = torch.nan
        steps(model, optimizer, range(step, step + 1))
    wire.save(folder)
    steps(model, optimizer, range(at, 4 * EVERY))
    again, theirs, other = model_and_wire(recipe, delay)
    steps(again, theirs, range(3))  # to be overwritten
    other.load(folder)
    begins = other.attempts
    steps(again, theirs, range(at, 4 * EVERY))
    found = {
        "begins": begins,
        "own": same(list(model.state_dict().values()), list(again.state_dict().values())),
        "shared": same(theta0(wire), theta0(other)),
        "alike": equal_on_all(values(model)),
    }
    end([wire, other])
    return found


def from_another_rank() -> dict[str, Any]:
    """A mean is refused in the middle of a round; after one it takes θ₀ and momentum along."""
    model, optimizer, wire = model_and_wire("topk(ratio=0.1)", 0)
    steps(model, optimizer, range(EVERY + 1))
    try:
        wire.mean_state_dict()
        refused = ""
    except ValueError as error:
        refused = str(error)
    steps(model, optimizer, range(EVERY + 1, 2 * EVERY))
    saved = wire.mean_state_dict()
    _again, _theirs, other = model_and_wire("topk(ratio=0.1)", 0)
    other.load_state_dict(saved)
    momentum = [each["momentum_buffer"] for each in wire.outer_optimizer.state.values()]
    theirs = [each["momentum_buffer"] for each in other.outer_optimizer.state.values()]
    return {
        "refused": refused,
        "theta": same(values(model), values(_again)),
        "momentum": same(momentum, theirs),
        "at": other.attempts,
    }


def not_finite(delay: int) -> dict[str, Any]:
    """Of rank 1 a number is infinite, in its momentum and so in a parameter: the mean is rank 0's alone."""
    model = perceptron(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sent: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: sent.__setitem__(slice(None), values(model)))
    wire = outer(model, optimizer, "topk(ratio=0.1)", outer=plain_sgd, delay=delay)
    steps(model, optimizer, range(EVERY + delay))
    memory = {name: each.clone() for name, each in state_of(wire)["memory"].items()}
    start = shared(wire, model)
    steps(model, optimizer, range(EVERY + delay, 2 * EVERY - 1))
    if dist.get_rank() == 1:
        next(iter(optimizer.state.values()))["momentum_buffer"].view(-1)[3] = torch.inf
    optimizer.zero_grad()
    loss_of(model, 99).backward()
    optimizer.step()
    leaving = [each.clone() for each in sent]
    optimizer.param_groups[0]["lr"] = 0.0
    steps(model, optimizer, range(200, 200 + delay))
    moved = [a - b for a, b in zip(start, shared(wire, model), strict=True)]
    # The small tensors travel whole, so there Δ of rank 0 is all that has moved them.
    whole = [n for n, (name, _) in enumerate(model.named_parameters()) if name not in memory]
    errors = []
    for n in whole:
        leaving_0 = leaving[n].clone()
        dist.broadcast(leaving_0, 0)
        errors.append(float((moved[n] - (start[n] - leaving_0)).abs().max()))
    after = state_of(wire)["memory"]
    momentum = [each["momentum_buffer"] for each in optimizer.state.values()]
    finite = all(bool((each.abs() < 1e3).all()) for each in momentum)
    handle.remove()
    return {
        "error": max(errors),
        "alike": equal_on_all(values(model)),
        "memory stays": all(torch.equal(after[name], each) for name, each in memory.items()),
        "finite": finite and all(bool(each.isfinite().all()) for each in values(model)),
        "rounds": wire.report().step,
    }


def state_of(wire: gradwire.OuterWire) -> dict[str, Any]:
    (state,) = wire.state_dict().values()
    return dict(state)


def not_finite_for_good() -> dict[str, Any]:
    """In the third round in a row rank 1 raises, and rank 0 hears of it; later rounds go on.

    Two in a row before a good one do not count.
    """
    model = perceptron(10)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco", every=1)
    raised = ""
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if dist.get_rank() == 1 and step != 2:
            next(model.parameters()).grad.fill_(torch.nan)
        try:
            optimizer.step()
        except gradwire.GradwireError as error:
            raised = f"{step}: {type(error).__name__}: {error}"
    steps(model, optimizer, range(6, 8))
    return {"raised": raised, "alike": equal_on_all(values(model)), "rounds": wire.report().step}


def not_finite_before_and_after_a_save() -> dict[str, Any]:
    """Two rounds in a row without rank 1, a save, and a third one in the resumed run."""
    folder = Path(os.environ[FOLDER]) / "not-finite"

    def built() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
        model = perceptron(10)
        optimizer = optimizer_of(model)
        return model, optimizer, outer(model, optimizer, "diloco", every=1)

    def spoilt(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> str:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if dist.get_rank() == 1:
            next(model.parameters()).grad.fill_(torch.nan)
        try:
            optimizer.step()
        except gradwire.GradwireError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    model, optimizer, wire = built()
    before = [spoilt(model, optimizer, step) for step in range(2)]
    wire.save(folder)
    again, theirs, other = built()
    other.load(folder)
    raised = spoilt(again, theirs, 2)
    steps(again, theirs, range(3, 5))
    found = {"before": before, "raised": raised, "alike": equal_on_all(values(again))}
    end([wire, other])
    return found


def nobody_left() -> dict[str, Any]:
    """All replicas are not finite: all go on from θ₀, which does not move."""
    model = perceptron(11)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco")
    steps(model, optimizer, range(EVERY))
    kept = shared(wire, model)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    steps(model, optimizer, range(EVERY, 2 * EVERY))
    return {"stays": same(kept, shared(wire, model)), "back": same(kept, values(model))}


def refusal(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The name of the error of a round's last step; empty if there is none."""
    try:
        steps(model, optimizer, range(EVERY - 1, EVERY))
    except (ValueError, gradwire.GradwireError) as error:
        return type(error).__name__
    return ""


def failing() -> dict[str, Any]:
    """Rank 1 casts a parameter: it raises, rank 0 hears of it, and no rank lands."""
    model = perceptron(12)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco")
    kept = shared(wire, model)
    steps(model, optimizer, range(EVERY - 1))
    before, head = values(model), model[-1]  # type: ignore[index]
    bias = head.bias
    if dist.get_rank() == 1:
        head.bias = nn.Parameter(bias.detach().clone())
    raised = refusal(model, optimizer)
    head.bias = bias
    stays = same(kept, shared(wire, model)) and not same(before, values(model))
    steps(model, optimizer, range(EVERY, 2 * EVERY))
    return {"raised": raised, "stays": stays, "alike": equal_on_all(values(model))}


def failing_at_the_end() -> dict[str, Any]:
    """The last round before `detach` fails: the one that `detach` makes brings what was learned."""
    model = perceptron(12)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "dense", outer=plain_sgd)
    steps(model, optimizer, range(EVERY - 1))
    head = model[-1]  # type: ignore[index]
    bias = head.bias
    if dist.get_rank() == 1:
        head.bias = nn.Parameter(bias.detach().clone())
    raised = refusal(model, optimizer)
    head.bias = bias
    means = [torch.stack(from_all(each)).mean(0) for each in values(model)]
    wire.detach()
    errors = [float((a - b).abs().max()) for a, b in zip(values(model), means, strict=True)]
    return {"raised": raised, "error": max(errors), "alike": equal_on_all(values(model))}


def leave_out_clearing(optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    optimizer.zero_grad()


def leave_out_zeroing(optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    optimizer.zero_grad(set_to_none=False)


def leave_out_saying(_optimizer: torch.optim.Optimizer, wire: gradwire.OuterWire) -> None:
    wire.drop_step()


def left_out(way: Callable[[Any, Any], None], skipped: tuple[int, ...]) -> dict[str, Any]:
    """Rank 1 leaves out some steps: rounds come at the same attempts, and replicas end alike."""
    model = perceptron(13)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco")
    counts = []
    for step in range(3 * EVERY):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step in skipped and dist.get_rank() == 1:
            way(optimizer, wire)
        else:
            optimizer.step()
        counts.append(wire.attempts)
    wire.detach()
    return {"counts": counts, "alike": equal_on_all(values(model)), "rounds": wire.report().step}


def cleared_late(in_a_row: int) -> dict[str, Any]:
    """Rank 1 leaves out the last step before a round, or more; that shows only in the next backward pass."""
    model = perceptron(14)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco")
    steps(model, optimizer, range(EVERY - 1))
    for number in range(in_a_row + 1):
        loss = loss_of(model, 100 + number)
        optimizer.zero_grad()
        loss.backward()  # in the second, rank 1 finds out, and its round comes at the end of the pass
        if number == in_a_row or dist.get_rank() == 0:
            optimizer.step()
    steps(model, optimizer, range(EVERY + in_a_row, 2 * EVERY))
    return {"attempts": wire.attempts, "alike": equal_on_all(values(model)), "rounds": wire.report().step}


def called(name: str, wrapped: bool, skipped: tuple[int, ...] = (1, 7)) -> dict[str, Any]:
    """Rank 1 leaves out some steps of a model that is called, and hands over its loss, as in the case `name`
    of `tests.support.called`.
    """
    case = CASES[name]
    torch.manual_seed(13)
    model: nn.Module = Task(case.form, frozen=case.frozen, checkpointed=case.checkpointed)
    if wrapped:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        model = nn.parallel.DistributedDataParallel(model, process_group=alone)
    given = [p for p in model.parameters() if p.requires_grad]
    parts = [[each] for each in given] if case.by_part else [given]
    optimizers = [optimizer_around(case.around, part) for part in parts]
    wire = outer(model, optimizers, "diloco")
    counts = []
    for step in range(3 * EVERY):
        model.zero_grad()
        case.call(model, step, 1.0).backward()
        for optimizer in optimizers:
            if step not in skipped or dist.get_rank() == 0:
                getattr(optimizer, "update", optimizer.step)()
        counts.append(wire.attempts)
    model.zero_grad()
    wire.detach()
    return {"counts": counts, "alike": equal_on_all(values(model)), "rounds": wire.report().step}


def by_halves(gives_inner: bool) -> dict[str, Any]:
    """Sharpness-aware minimization; in one of the steps rank 1 leaves out the batch after the first half."""
    model = perceptron(13)
    sam = SAM(list(model.parameters()))
    wire = outer(model, sam.base if gives_inner else sam, "diloco")
    counts = []
    for step in range(3 * EVERY):
        loss_of(model, step).backward()
        if step == EVERY and dist.get_rank() == 1:
            sam.zero_grad()
        else:
            sam.first_step()
            loss_of(model, step).backward()
            sam.second_step()
        counts.append(wire.attempts)
    wire.detach()
    return {"counts": counts, "alike": equal_on_all(values(model)), "rounds": wire.report().step}


def in_place_of_one() -> list[int]:
    """Two optimizers share what was given to one, as in a later phase; then one around both."""
    model = perceptron(15)
    wire = outer(model, optimizer_of(model), every=100)
    halves = [optimizer_of(part) for part in (model[:2], model[2:])]  # type: ignore[index]
    found = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
        for each in halves:
            each.step()
        found.append(wire.attempts)
    around = optimizer_of(model)
    around.register_step_pre_hook(lambda *_: halves[0].step())
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
        around.step()
        found.append(wire.attempts)
    wire.detach()
    around.step()
    return [*found, wire.attempts]


def counting() -> dict[str, Any]:
    """Micro-batches, several optimizers, passes of `autograd.grad`, closures, and a scaler's skip."""
    found = {}
    model = perceptron(15)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, every=100)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            loss_of(model, 10 * step + micro).backward()
        optimizer.step()
    found["micro"] = wire.attempts

    model = perceptron(15)
    halves = [optimizer_of(part) for part in (model[:2], model[2:])]  # type: ignore[index]
    wire = outer(model, halves, every=100)
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
        for each in halves:
            each.step()
    found["several"] = wire.attempts
    for step in range(2):
        model.zero_grad()
        loss_of(model, step).backward()
        halves[0].step()
    loss_of(model, 0).backward()
    found["one of several"] = wire.attempts

    model = perceptron(15)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, every=100)
    for step in range(3):
        inputs, _ = batch(step)
        torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found["grad"] = wire.attempts

    model = perceptron(15)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    wire = outer(model, lbfgs, every=100)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(2):
        lbfgs.step(closure)
    found["closure"] = wire.attempts

    model = perceptron(15)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, every=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * (torch.inf if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    found["scaler"] = wire.attempts
    return found


def uneven() -> dict[str, Any]:
    """Rank 1 has half the data: it takes part in later rounds without weight."""
    model = perceptron(16)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.1)", outer=plain_sgd)
    with wire.join():
        steps(model, optimizer, range(11 if dist.get_rank() == 0 else 5))
    ends = equal_on_all(values(model))
    steps(model, optimizer, range(20, 20 + EVERY))
    return {
        "ends": ends,
        "goes on": equal_on_all(values(model)),
        "shared": same(values(model), shared(wire, model)),
    }


def both_at_once() -> bool:
    """Another recipe, before which all that is unsent is sent, and another optimizer right after it."""
    model = perceptron(19)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.05)", outer=plain_sgd)
    steps(model, optimizer, range(EVERY))
    wire.switch("dense")
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire.switch_optimizer(second)
    steps(model, second, range(EVERY, 3 * EVERY))
    return equal_on_all(values(model)) and wire.report().recipe == "dense"


def at_the_end() -> dict[str, Any]:
    """A switch in the middle of a round, evaluation at θ₀, and a last round that leaves nothing unsent."""
    model = perceptron(17)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.05)", delay=1, outer=plain_sgd)
    steps(model, optimizer, range(EVERY + 2))
    wire.switch("topk(ratio=0.2)")
    steps(model, optimizer, range(EVERY + 2, 2 * EVERY))
    mine, at_start = values(model), shared(wire, model)
    back = same(mine, values(model))
    unsent = sum(float(each.abs().sum()) for each in state_of(wire)["memory"].values())
    wire.detach()
    alike = equal_on_all(values(model))
    report = wire.report()
    steps(model, optimizer, range(2 * EVERY, 3 * EVERY))
    return {
        "back": back,
        "start": equal_on_all(at_start) and not equal_on_all(mine),
        "unsent": unsent > 0,
        "alike": alike,
        "apart again": not equal_on_all(values(model)),
        "recipe": report.recipe,
    }


def taking_turns(delay: int) -> dict[str, Any]:
    """Two parts of a model, each with rounds of its own, half a cycle apart; saved in the middle, too."""
    folder = Path(os.environ[FOLDER])

    def built() -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Module]]:
        torch.manual_seed(21)
        parts = [
            nn.Sequential(nn.Linear(32, 64), nn.Tanh()),
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)),
        ]
        model = nn.Sequential(*parts)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), parts

    model, optimizer, (first, last) = built()
    wires = [outer(first, optimizer, "topk(ratio=0.1)", delay=delay)]
    steps(model, optimizer, range(EVERY // 2))
    wires.append(outer(last, optimizer, "topk(ratio=0.1)", delay=delay))
    alike, landed = True, list[list[bool]]()
    for step in range(EVERY // 2, 4 * EVERY):
        if step == 2 * EVERY + 1:
            for number, wire in enumerate(wires):
                wire.save(folder / f"part-{delay}-{number}")
        before = [[each.clone() for each in theta0(wire)] for wire in wires]
        steps(model, optimizer, range(step, step + 1))
        landed.append([not same(old, theta0(wire)) for old, wire in zip(before, wires, strict=True)])
        alike &= all(equal_on_all(theta0(wire)) for wire in wires)
    again, theirs, parts = built()
    others = [outer(part, theirs, "topk(ratio=0.1)", delay=delay) for part in parts]
    for number, other in enumerate(others):
        other.load(folder / f"part-{delay}-{number}")
    steps(again, theirs, range(2 * EVERY + 1, 4 * EVERY))
    found = {
        "alike": alike,
        "in turn": not any(all(each) for each in landed),
        "rounds": [sum(each) for each in zip(*landed, strict=True)],
        "resumed": same(values(model), values(again)),
    }
    end([*wires, *others])
    return found


class ScheduleFree(torch.optim.SGD):
    """In the manner of schedulefree's: the model's parameters are others in evaluation."""

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False


def two_phases(delay: int) -> dict[str, Any]:
    """Another optimizer from the middle of a round on, in which the first one's steps count, too."""
    folder = Path(os.environ[FOLDER]) / f"phases-{delay}"

    def built() -> tuple[nn.Module, gradwire.OuterWire, list[torch.optim.Optimizer]]:
        model = perceptron(37)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2), optimizer_of(model, lr=0.5)]
        return model, outer(model, optimizers[0], "int4", delay=delay), optimizers

    model, wire, (first, second) = built()
    steps(model, first, range(EVERY + 1))
    wire.switch_optimizer(second)
    counts, alike = [wire.attempts], []
    for step in range(EVERY + 1, 3 * EVERY + delay):
        before = shared(wire, model)
        steps(model, second, range(step, step + 1))
        counts.append(wire.attempts)
        if not same(before, shared(wire, model)):
            alike.append((wire.attempts, equal_on_all(shared(wire, model))))
        if step == 2 * EVERY:
            wire.save(folder)
    trained = shared(wire, model)
    steps(model, first, range(60, 60 + EVERY))  # which is not followed any more
    ended = wire.attempts
    again, other, (_, theirs) = built()
    other.switch_optimizer(theirs)
    other.load(folder)
    steps(again, theirs, range(2 * EVERY + 1, 3 * EVERY + delay))
    try:
        wire.switch_optimizer(ScheduleFree(model.parameters(), lr=0.1))
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "counts": counts,
        "landed": alike,
        "ended": ended,
        "resumed": same(trained, shared(other, again)),
        "refused": refused,
    }


def once_each() -> dict[str, Any]:
    """Optimizers that can be read once, on one rank or on both; and what is refused in their place."""
    found: dict[str, Any] = {}
    for name, here in (("both", True), ("one", dist.get_rank() == 0)):
        model = perceptron(1)
        halves = [optimizer_of(part) for part in (model[:2], model[2:])]
        wire = outer(model, iter(halves) if here else halves, every=2)
        for step in range(4):
            model.zero_grad()
            loss_of(model, step).backward()
            for each in halves:
                each.step()
        found[name] = wire.attempts, equal_on_all(values(model))
        wire.switch_optimizer(each for each in halves)
        wire.detach()
    for name, given in (("parameters", model.parameters()), ("nothing", iter(()))):
        try:
            outer(model, given if dist.get_rank() == 0 else halves)
        except (ValueError, gradwire.RanksDisagree) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def refused() -> dict[str, str]:
    """The first words of each refusal."""
    found = {}

    def tried(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "accepted"
        except (ValueError, gradwire.GradwireError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = perceptron(18)
    optimizer = optimizer_of(model)
    tried("delay", lambda: outer(model, optimizer, delay=EVERY))
    tried("every", lambda: outer(model, optimizer, every=0))
    tried("neither", lambda: outer(model, optimizer, replicas=None))
    tried("both", lambda: outer(model, optimizer, members=gradwire.members.fixed(dist.group.WORLD)))
    tried("no time", lambda: outer(model, optimizer, every_seconds=0.0))
    tried("time and delay", lambda: outer(model, optimizer, every_seconds=1.0, delay=1))
    tried("auto", lambda: outer(model, optimizer, "auto"))
    tried("gcomp", lambda: outer(model, optimizer, "gcomp"))
    tried("no optimizer", lambda: outer(model, None))
    tried("outer", lambda: outer(model, optimizer, outer=lambda given: optimizer))  # type: ignore[arg-type]
    tried("schedule-free", lambda: outer(model, ScheduleFree(model.parameters(), lr=0.1)))
    tried("ranks", lambda: outer(model, optimizer, every=4 + dist.get_rank()))
    wire = outer(model, optimizer)
    tried("flush", wire.flush)
    tried("switch", lambda: wire.switch("auto"))
    tried("attach", lambda: gradwire.attach(model, optimizer, "dense", replicas=dist.group.WORLD))
    tried("twice", lambda: outer(model, optimizer))
    ddp = nn.parallel.DistributedDataParallel(perceptron(18))
    gradwire.attach(ddp, optimizer_of(ddp), "dense")
    tried("after attach", lambda: outer(ddp.module, optimizer_of(ddp)))
    tried("ddp over all", lambda: outer(ddp, optimizer_of(ddp)))
    return found


def dropped_in_flight() -> dict[str, Any]:
    """Rank 0 drops its model while its round waits for rank 1's: rounds that landed, and whether the next
    models have the same group.
    """

    def group() -> str:
        return wire.attached.backward.reducer.comm.group.group_name

    model = perceptron()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.1)", delay=2)
    first, rounds = group(), 0
    if dist.get_rank() == 0:
        steps(model, optimizer, range(EVERY))
        del model, optimizer, wire
    dist.barrier()
    if dist.get_rank() == 1:
        steps(model, optimizer, range(EVERY + 2))
        rounds = wire.report().step
        del model, optimizer, wire
    deadline_s = time.monotonic() + 10
    while lent() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    model = perceptron()
    wire = outer(model, optimizer_of(model))
    return {"rounds": rounds, "lent again": group() == first}


# -- worlds of their own: machines of two ranks, and ranks that die


class Ranked(nn.Module):
    """Two layers, of which FSDP cuts rows unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))
        self.first, self.norm, self.last = nn.Linear(32, 131), nn.LayerNorm(131), nn.Linear(131, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.gain * self.last(torch.tanh(self.norm(self.first(inputs))))
        assert isinstance(out, Tensor)
        return out


def ranked() -> nn.Module:
    torch.manual_seed(20)
    return Ranked()


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters, gathered where they are sharded."""
    return [
        each.detach().full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for each in model.parameters()
    ]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))


def on_two_sites(kind: str, recipe: str, delay: int = 0) -> dict[str, Any]:
    """Two sites of two ranks, DDP or FSDP2 inside, beside DiLoCo of our own between two plain replicas."""
    sites = mesh()
    inside, between = sites["ranks"], sites["sites"]
    plain, module = ranked(), ranked()
    begin = values(plain)
    if kind == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(module, process_group=inside.get_group())
    else:
        fully_shard(module, mesh=inside)
        model = module
    theirs = nn.parallel.DistributedDataParallel(plain, process_group=inside.get_group())
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, theirs))
    wire = outer(model, optimizer, recipe, replicas=between, delay=delay)
    own = OwnDiLoCo(plain, delay, between.get_group())
    for step in range(3 * EVERY + delay):
        steps(model, optimizer, range(step, step + 1))
        steps(theirs, other, range(step, step + 1))
        own.after_step()
    now = whole(module)
    gone = torch.cat([(a - b).flatten() for a, b in zip(values(plain), begin, strict=True)]).norm()
    apart = torch.cat([(a - b).flatten() for a, b in zip(now, values(plain), strict=True)]).norm()
    report = wire.report()
    return {
        "relative": float(apart / gone),
        "alike": equal_on_all(now),
        "inside alike": equal_on_all(now, inside.get_group()),
        "rounds": report.step,
        "bytes": report.wire_bytes_per_step,
        "elements": sum(each.numel() for each in plain.parameters()),
    }


def resumed_on_two_sites(kind: str) -> dict[str, Any]:
    """Saved in the middle of a round, with the result of one under way."""
    folder = Path(os.environ[FOLDER]) / f"sites-{kind}"
    sites = mesh()

    def built() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
        module = ranked()
        model: nn.Module = module
        if kind == "ddp":
            group = sites["ranks"].get_group()
            model = nn.parallel.DistributedDataParallel(module, process_group=group)
        else:
            fully_shard(module, mesh=sites["ranks"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"replicas": sites["sites"], "delay": 2}
        return module, model, optimizer, outer(model, optimizer, "topk(ratio=0.1)", **options)

    module, model, optimizer, wire = built()
    steps(model, optimizer, range(EVERY + 1))
    wire.save(folder)
    steps(model, optimizer, range(EVERY + 1, 3 * EVERY))
    again, theirs, their_optimizer, other = built()
    steps(theirs, their_optimizer, range(2))
    other.load(folder)
    steps(theirs, their_optimizer, range(EVERY + 1, 3 * EVERY))
    found = {"same": same(whole(module), whole(again))}
    end([wire, other])
    return found


def loaded_on_two_sites(kind: str, way: Way) -> dict[str, Any]:
    """All ranks load other values in the middle of a round; then rank 3 alone, which all hear of."""
    sites = mesh()
    module = ranked()
    torch.manual_seed(36)
    source = Ranked()
    model: nn.Module = module
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(module, process_group=sites["ranks"].get_group())
    else:
        fully_shard(module, mesh=sites["ranks"])
        fully_shard(source, mesh=sites["ranks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = outer(model, optimizer, "topk(ratio=0.1)", replicas=sites["sites"], delay=1)
    steps(model, optimizer, range(EVERY + 2))
    state = copied(source.state_dict())
    way(module, state)
    rested(model, optimizer, EVERY + 2, 2 * EVERY)
    target = whole(source)
    with wire.shared_parameters():
        shown = whole(module)
    found = {"stays": same(whole(module), target), "shared": same(shown, target)}
    if dist.get_rank() == 3:
        first = next(module.parameters())
        other = {"first.weight": first.detach() * 2.0}
        module.load_state_dict(other, strict=False)
    raised = ""
    try:
        steps(model, optimizer, range(50, 50 + EVERY + 1))
    except gradwire.RanksDisagree as error:
        raised = str(error)
    return found | {"raised": raised}


def one_shard_not_finite() -> dict[str, Any]:
    """NaN in a shard on rank 3: its whole site takes θ₀ back, and the mean is the other site's."""
    sites = mesh()
    module = ranked()
    fully_shard(module, mesh=sites["ranks"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    sent: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: sent.__setitem__(slice(None), whole(module)))
    outer(module, optimizer, "diloco", replicas=sites["sites"], outer=plain_sgd, every=1)

    def spoil(*_: Any) -> None:
        if dist.get_rank() == 3:
            next(module.parameters()).detach().to_local().fill_(torch.nan)  # type: ignore[attr-defined]

    other = optimizer.register_step_pre_hook(spoil)
    steps(module, optimizer, range(1))
    good = [each.clone() for each in sent]
    for each in good:
        dist.broadcast(each, 0)
    now = whole(module)
    errors = [float((a - b).abs().max()) for a, b in zip(now, good, strict=True)]
    other.remove()
    handle.remove()
    return {"error": max(errors), "alike": equal_on_all(now)}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def saving(_wire: gradwire.OuterWire) -> None:
    patch.object(os, "fsync", die).start()


def forming(_wire: gradwire.OuterWire) -> None:
    patch.object(Backward, "submit", die).start()


def exchanging(_wire: gradwire.OuterWire) -> None:
    patch.object(ProcessGroupComm, "issue", die).start()


def before_landing(wire: gradwire.OuterWire) -> None:
    wire.outer_optimizer.register_step_pre_hook(die)


def landing(wire: gradwire.OuterWire) -> None:
    wire.outer_optimizer.register_step_post_hook(die)


@dataclass(frozen=True)
class Death:
    """`saved_at` attempted steps rank 1 is about to die, and rank 0 hears of it in step `heard_at`."""

    delay: int
    saved_at: int
    heard_at: int
    prepare: Callable[[gradwire.OuterWire], None]


AT = 2 * EVERY - 1
"""The step in which the second round leaves."""

DEATHS = {
    "before a round": Death(0, AT, AT, die),
    "while a change is formed": Death(0, AT, AT, forming),
    "in the exchange": Death(0, AT, AT, exchanging),
    "in the exchange, delayed": Death(2, AT, AT + 2, exchanging),
    # The other one has landed, and hears of it in the next round.
    "before landing": Death(0, AT, AT + EVERY, before_landing),
    "while landing late": Death(2, AT + 2, AT + EVERY + 2, landing),
    "while saving": Death(0, AT - 1, AT, saving),
}


def kept(death: str) -> Path:
    return Path(os.environ[FOLDER]).parent / f"kept {death}"


def dying(name: str) -> dict[str, Any]:
    """Saved in the middle of a round. Then rank 1 dies, and rank 0 hears of it."""
    death = DEATHS[name]
    model, optimizer, wire = model_and_wire("topk(ratio=0.1)", death.delay)
    steps(model, optimizer, range(death.saved_at))
    wire.save(kept(name))
    if dist.get_rank() == 1:
        death.prepare(wire)
    step = death.saved_at
    try:
        for step in range(death.saved_at, 4 * EVERY):
            if death.prepare is saving and step > death.saved_at:
                wire.save(kept(name))
            steps(model, optimizer, range(step, step + 1))
    except gradwire.TransportError as error:
        return {"heard at": step, "text": str(error)}
    return {"heard at": None}


def going_on() -> dict[str, Any]:
    """From what each of the dead left, beside a run that nothing has interrupted."""
    found = {}
    for delay in (0, 2):
        model, optimizer, wire = model_and_wire("topk(ratio=0.1)", delay)
        steps(model, optimizer, range(4 * EVERY))
        for name, death in DEATHS.items():
            if death.delay == delay:
                again, theirs, other = model_and_wire("topk(ratio=0.1)", delay)
                other.load(kept(name))
                begins = other.attempts
                steps(again, theirs, range(begins, 4 * EVERY))
                alike = same(list(model.state_dict().values()), list(again.state_dict().values()))
                found[name] = [begins, alike and same(theta0(wire), theta0(other))]
                end([other])
        end([wire])
    return found


def from_two_ranks() -> dict[str, Any]:
    """One rank goes on from what two have saved, with a round under way."""
    model, optimizer, wire = model_and_wire("topk(ratio=0.1)", 2)
    wire.load(kept("while landing late"))
    begins = same(values(model), shared(wire, model))
    steps(model, optimizer, range(3 * EVERY))
    finite = all(bool(each.isfinite().all()) for each in values(model))
    found = {"begins": begins, "attempts": wire.attempts, "finite": finite}
    end([wire])
    return found


LOADED: dict[str, tuple[str, Way]] = {
    "ddp inside, loaded": ("ddp", load_all),
    "fsdp inside, loaded": ("fsdp", load_all),
    "fsdp inside, loaded by dcp": ("fsdp", load_by_dcp),
    "fsdp inside, set": ("fsdp", load_by_setting),
}
SCENES: dict[str, Callable[[], Any]] = {
    **{name: partial(loaded_on_two_sites, *how) for name, how in LOADED.items()},
    **{f"dying {name}": partial(dying, name) for name in DEATHS},
}
"""Those that need ranks of their own."""
