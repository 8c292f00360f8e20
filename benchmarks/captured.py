"""Gradients of a model in training, with the parameters and optimizer state that they were to change."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.lab.workloads import catalogue


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
