"""Checks that policy, optimizers and layout suit the model: mistakes that would otherwise pass unnoticed."""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from gradwire.errors import GradwireWarning
from gradwire.recipes.parse import short
from gradwire.sources.unwrap import Optimizers
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.layout import Layout, Policy


def check_policy(policy: Policy | None, names: Collection[str]) -> None:
    """Raise `ValueError` for a pattern that matches none of the parameters' `names`.

    >>> check_policy({"*.wieght": "int8"}, ["head.weight", "head.bias"])
    Traceback (most recent call last):
    ...
    ValueError: policy: no parameter matches '*.wieght'. Names are like 'head.weight'
    """
    if not isinstance(policy, Mapping):
        return
    for pattern, text in policy.items():
        if not isinstance(pattern, str):
            raise ValueError(f"policy: {pattern!r} is not a pattern over names of parameters")
        if not isinstance(text, str | None):
            raise ValueError(f"policy: {pattern!r} has {text!r}, which is not the text of a recipe")
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            like = f". Names are like {near[0]!r}" if near else ": the model has none"
            raise ValueError(f"policy: no parameter matches {pattern!r}{like}")


def in_words(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Names, shapes and types of tensors that ranks send by their number, to compare over ranks.

    >>> in_words([("mean", torch.zeros(3)), ("count", torch.tensor(0))])
    'mean (3,) torch.float32;count () torch.int64'
    """
    return ";".join(f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors)


def check_optimizers(optimizers: Optimizers, module: nn.Module) -> None:
    """Raise `ValueError` for an optimizer that steps nothing of `module`, as one of another model."""
    ours = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in ours for parameter in theirs):
            raise ValueError(
                f"the optimizer {type(optimizer).__name__} has no parameter of this model: it was built for "
                "another, or for copies of its parameters. Build it from model.parameters(), or leave it out"
            )


def warn_without_optimizer(layout: Layout, optimizers: Optimizers) -> None:
    """Warn where `attach` was called, if something goes by an optimizer that was not given."""
    if optimizers:
        return
    if any(flat_buffer.exchange.laws.asks_optimizer for flat_buffer in layout.flat_buffers):
        warnings.warn(
            f"{short(layout.main.text)} drops what the optimizer cannot see, but attach was given no "
            "optimizer: gradients are sent without loss, in 0.7 to 0.9 of the bytes. Call "
            "gradwire.attach(ddp, optimizer, …).",
            GradwireWarning,
            stacklevel=4,
        )
    if any(flat_buffer.memory.covers_momentum for flat_buffer in layout.flat_buffers):
        warnings.warn(
            f"{short(layout.main.text)} applies momentum itself, before gradients are sent, but attach was "
            "given no optimizer. It must be torch.optim.SGD(momentum=0): any other may apply momentum twice. "
            "Call gradwire.attach(ddp, optimizer, …).",
            GradwireWarning,
            stacklevel=4,
        )


def check_momentum(layout: Layout, optimizers: Optimizers) -> None:
    """Raise `ValueError` where momentum would be applied twice, or to some parameters only.

    Without an optimizer nothing is known, and nothing is checked.
    """
    covering = [flat_buffer for flat_buffer in layout.flat_buffers if flat_buffer.memory.covers_momentum]
    if not covering or not optimizers:
        return
    for optimizer in optimizers:
        plain_sgd = isinstance(optimizer, torch.optim.SGD)
        if not plain_sgd or any(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(
                f"{short(layout.main.text)} applies momentum itself, before gradients are sent: give it "
                f"torch.optim.SGD(momentum=0), not {type(optimizer).__name__} with a momentum or averages of "
                "its own, or set the recipe's momentum=0"
            )
    without = _others(layout, covering)
    if without:
        raise ValueError(
            f"the recipe applies momentum before gradients are sent, but the policy sends {without[0]!r} by "
            "a recipe without it: send it by one with the same momentum, or set the recipe's momentum=0"
        )


def _others(layout: Layout, covering: list[FlatBuffer]) -> list[str]:
    outside = [
        slot.spec
        for flat_buffer in layout.flat_buffers
        if flat_buffer not in covering
        for slot in flat_buffer.slots
    ]
    return [*layout.direct, *(spec.name for spec in outside)]
