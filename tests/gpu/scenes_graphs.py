"""What ranks train with and without captured kernels, over NCCL on one GPU; on the CPU over gloo, on a
simulated device that records operators and kernels, and replays them.

A scene returns what `tests.gpu.ranks.judged` reads: `tests.gpu.scenes_nccl`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.environment import TIMED_EVERY
from gradwire.quantities import bytes_text
from tests.device.scenes_placed import on
from tests.gpu.scenes_nccl import DEVICE, Found, found
from tests.support.models import batch, digest, optimizer_of
from tests.support.recording import within_kernels
from tests.support.simulated import Near
from tests.support.where import WHERE

CAPTURED = {
    "topk": "topk(ratio=0.05)",
    "leader_topk": "leader_topk(ratio=0.05)",
    "powersgd": "powersgd",
    "acpsgd": "acpsgd",
}
"""Recipes with stretches that are captured."""
STEPS, BAD, LEFT_OUT, SAVED = 24, (3, 14), (4, 16), 12


@contextmanager
def untimed() -> Iterator[None]:
    """Few steps are timed, and not the first ones under a recipe. They would be eager."""
    with patch.dict(os.environ, {TIMED_EVERY: "16"}), patch("gradwire.step.installed._FIRST", 0):
        yield


@contextmanager
def placed() -> Iterator[None]:
    """Models that are attached here have their gradients on a device with graphs."""
    with ExitStack() as held:
        held.enter_context(untimed())
        if WHERE.type == "cpu":
            held.enter_context(within_kernels())
            held.enter_context(on(Near(), streams=True))
        yield


class Matrices(nn.Module):
    """Of these alone, one bucket: so that all means lie in it, at addresses that stay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (
            nn.Linear(*sizes, bias=False) for sizes in ((32, 64), (64, 64), (64, 32))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """As many numbers as targets have."""
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.third(hidden).view(len(inputs), 8, 4).sum(-1)


class Training:
    """A model of one rank, and its wire."""

    def __init__(self, text: str, graphs: bool) -> None:
        self.ddp = DistributedDataParallel(Matrices().to(WHERE), gradient_as_bucket_view=True)
        self.optimizer = optimizer_of(self.ddp)
        self.wire = gradwire.attach(self.ddp, self.optimizer, text, placement="device", cuda_graphs=graphs)

    def backward(self, number: int, spoilt: bool = False) -> None:
        """Gradients of a batch, added to those that are there. One of rank 1 may be NaN."""
        inputs, targets = batch(number)
        if spoilt and dist.get_rank() == 1:
            inputs[0, 0] = torch.nan
        nn.functional.mse_loss(self.ddp(inputs), targets).backward()

    def step(self, number: int) -> None:
        """A usual one."""
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()


def plain(training: Training) -> None:
    for number in range(STEPS):
        training.step(number)


def not_finite(training: Training) -> None:
    """A NaN on rank 1, and no optimizer step on any, before graphs are there and afterwards."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(number, number in BAD)
        if number not in BAD:
            training.optimizer.step()


def accumulated(training: Training) -> None:
    """Two batches for each step: with `no_sync` one exchange, and without it two, of one step."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        with training.ddp.no_sync() if number % 4 < 2 else nullcontext():
            training.backward(2 * number)
        training.backward(2 * number + 1)
        training.optimizer.step()


def left_out(training: Training) -> None:
    """No optimizer uses the gradients of some steps."""
    for number in range(STEPS):
        training.step(number)
        if number in LEFT_OUT:
            training.optimizer.zero_grad()
            training.backward(1000 + number)


def saved(training: Training) -> None:
    """The state is loaded back in the middle of the run, and the run goes on from there."""
    for number in range(SAVED):
        training.step(number)
    model, state = copy.deepcopy(training.ddp.module.state_dict()), training.wire.state_dict()
    for number in range(SAVED, STEPS):
        training.step(number)
    training.ddp.module.load_state_dict(model)
    training.wire.load_state_dict(state)
    for number in range(SAVED, STEPS):
        training.step(number)


LIVES: dict[str, Callable[[Training], None]] = {
    "plain": plain,
    "a NaN on one rank": not_finite,
    "gradients accumulated": accumulated,
    "steps left out": left_out,
    "saved and loaded": saved,
}


class Left(NamedTuple):
    """By a training."""

    digest: str
    graph_bytes: int
    step: int


def trained(text: str, life: Callable[[Training], None], graphs: bool) -> Left:
    """Train a rank through its life."""
    with placed():
        training = Training(text, graphs)
        life(training)
        report = training.wire.report()
    return Left(digest(training.ddp), report.graph_bytes, report.step)


def compared(text: str, life: Callable[[Training], None], *, on_all_ranks: bool = True) -> Found:
    """Captured and eager; without `on_all_ranks` only rank 0 captures."""
    captures = on_all_ranks or dist.get_rank() == 0
    there, here = trained(text, life, captures), trained(text, life, graphs=False)
    wrong = []
    if (there.digest, there.step) != (here.digest, here.step):
        wrong.append(f"{there} beside {here} of eager steps")
    if (there.graph_bytes > 0) != captures:
        wrong.append(f"{there.graph_bytes} bytes of graphs")
    return found(there.digest, f"graphs keep {bytes_text(there.graph_bytes)}", "; ".join(wrong))


def host_time() -> Found:
    """GPT-2: a step and the host's time of eager and of captured kernels, beside DDP's."""
    import gpu_steps

    recipe = "topk(ratio=0.01)"
    with placed():
        rows, ways = gpu_steps.table(
            gpu_steps.gpt2, (recipe, recipe + gpu_steps.GRAPHS), DEVICE, hooked=False
        )
    prints = "".join(digest(each.model) for each in ways.values())
    wire = ways[recipe + gpu_steps.GRAPHS].wire
    assert wire is not None
    kept = bytes_text(wire.report().graph_bytes)
    return found(prints, f"{gpu_steps.as_text(rows)}\n\ngraphs keep {kept}")


SCENES: dict[str, Callable[[], Any]] = {
    **{f"{name}, plain": partial(compared, text, plain) for name, text in CAPTURED.items()},
    "host time": host_time,
    **{
        f"{name}, {life}": partial(compared, text, act)
        for life, act in LIVES.items()
        for name, text in CAPTURED.items()
        if act is not plain
    },
    **{
        f"{name}, one rank captures": partial(compared, text, plain, on_all_ranks=False)
        for name, text in CAPTURED.items()
    },
}
"""What is wanted most first."""
