"""Ways in which people call a model and make a step, and what is said meanwhile: for scenes."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import batch, digest, optimizer_of, perceptron

Loop = tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]


def wrapped(model: nn.Module, source: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model under DDP with these `options`, or as it is, and what `attach` needs for it."""
    if source == "ddp":
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options}), {}
    return model, {"replicas": dist.group.WORLD}


def attached(recipe: str, source: str = "ddp", **options: Any) -> Loop:
    """A model, attached with or without a wrapper, with plain SGD."""
    model, given = wrapped(perceptron(), source)
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, **given, **options)


def bad_batch(number: int, factor: float) -> tuple[Tensor, Tensor]:
    """A batch, which on rank 1 alone is `factor` times too large."""
    inputs, targets = batch(number)
    scale = factor if dist.get_rank() == 1 else 1.0
    return inputs * scale, targets * scale


def backward(model: nn.Module, number: int, factor: float = 1.0) -> Tensor:
    """The loss of one such batch, and its gradients."""
    inputs, targets = bad_batch(number, factor)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    """Steps with the batches of these numbers."""
    for number in numbers:
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


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


def clear(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """Go on with the next batch."""
    optimizer.zero_grad()


def clear_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """As before torch 2."""
    optimizer.zero_grad(set_to_none=False)


@dataclass(frozen=True)
class Run:
    """A run's end: a digest of all parameters, and what the report counts; what was said meanwhile."""

    digest: str
    step: int | None
    dropped: int | None
    """Both `None` without a wire."""
    said: tuple[str, ...] = ()

    @property
    def end(self) -> tuple[str, int | None]:
        """The parameters and the step."""
        return self.digest, self.step


def ended(model: nn.Module, wire: gradwire.Wire | None, said: Iterable[str] = ()) -> Run:
    counted = (None, None) if wire is None else (wire.report().step, wire.report().dropped_steps)
    return Run(digest(model), *counted, tuple(said))


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
