"""Scenes of placements: what is saved and resumed, an encode that fails, and replicas that are compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.codec.select.topk import TopK
from tests.device.scenes_placed import on, watched
from tests.support.depth import drawn
from tests.support.models import batch, digest, optimizer_of, perceptron
from tests.support.ranks import FOLDER
from tests.support.simulated import Near, Simulated
from tests.support.states import own_state

STEPS, BAD, SAVED = 7, 1, 4
"""Over streams it is not known yet, when the save begins, whether the step before it counts. One does not."""

PLACES: dict[str, tuple[PlacementName, bool]] = {
    "host": ("host", False),
    "staged": ("device", False),
    "stream": ("device", True),
}
"""By the name of a placement what is asked for, and whether gloo passes for NCCL."""


class Training:
    """A model, attached on a device or on the CPU."""

    def __init__(self, recipe: str, device: Simulated | None, placed: str, **options: Any) -> None:
        asked, streams = PLACES[placed]
        self.device, self.model = device, DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
        self.optimizer = optimizer_of(self.model, lr=0.1)
        with ExitStack() as held:
            if device is not None:
                held.enter_context(on(device, streams=streams))
            self.wire = gradwire.attach(self.model, self.optimizer, recipe, placement=asked, **options)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """The race finder watches, if there is one."""
        with ExitStack() as held:
            if self.device is not None:
                held.enter_context(watched(self.device, self.wire))
            yield

    def step(self, number: int) -> None:
        """In step `BAD` a gradient is NaN on rank 1, and the optimizer is skipped on all."""
        inputs, targets = batch(number)
        if number == BAD and dist.get_rank() == 1:
            inputs[0, 0] = torch.nan
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        if number != BAD:
            self.optimizer.step()

    def steps(self, numbers: range) -> str:
        """The fingerprint of the parameters after them."""
        for number in numbers:
            self.step(number)
        return digest(self.model)


def _device(placed: str) -> Simulated:
    return Simulated() if placed == "host" else Near()


def _bits(memory: dict[str, Tensor]) -> list[list[float]]:
    return [memory[name].view(-1)[:50].tolist() for name in sorted(memory)]


def resumes(recipe: str, placed: str, **options: Any) -> dict[str, Any]:
    """Trained through on the CPU; on the device saved in between, and resumed in two ways."""
    folder = Path(os.environ[FOLDER], f"{placed} {recipe}")
    here = Training(recipe, None, placed, **options)
    here.steps(range(SAVED))
    expected, expected_mean = own_state(here.wire), here.wire.mean_state_dict()["mean"]
    through = here.steps(range(SAVED, STEPS))

    device = _device(placed)
    first = Training(recipe, device, placed, **options)
    with first.seen():
        first.steps(range(SAVED))
        saved, mean = own_state(first.wire), first.wire.mean_state_dict()["mean"]
        numbers = [first.wire.save(folder)]
        model = {name: each.clone() for name, each in first.model.module.state_dict().items()}
        first.steps(range(SAVED, STEPS - 1))
        # Over streams the last of these steps is not committed when the state of an earlier one comes.
        first.model.module.load_state_dict(model)
        numbers.append(first.wire.load(folder) or 0)
        rewound = first.steps(range(SAVED, STEPS))

    second = Training(recipe, device, placed, **options)
    second.model.module.load_state_dict(model)
    with second.seen():
        second.wire.load_state_dict(saved)
        resumed = second.steps(range(SAVED, STEPS))
        report = second.wire.report()
    return {
        "through": through,
        "rewound": rewound,
        "resumed": resumed,
        "numbers": [*numbers, saved["step"], expected["step"]],
        "same memory": _bits(saved["memory"]) == _bits(expected["memory"]),
        "same mean": _bits(mean["memory"]) == _bits(expected_mean["memory"]),
        "remembers": any(bool(each.any()) for each in saved["memory"].values()),
        "placement": report.placement,
        "step": report.step,
        "races": device.races[:5],
    }


def _accident(recipe: str, device: Simulated | None, placed: str, **options: Any) -> dict[str, Any]:
    """A training in which rank 1 cannot encode once."""
    training = Training(recipe, device, placed, **options)

    def broken(*_: Any) -> Any:
        raise MemoryError("out of luck")

    with training.seen():
        training.steps(range(2))
        kind = "none"
        with ExitStack() as held:
            if dist.get_rank() == 1:
                held.enter_context(patch.object(TopK, "select", broken))
            try:
                training.step(2)
            except Exception as error:
                kind = type(error).__name__
        spoilt = all(each.grad.isnan().all() for each in training.model.parameters() if each.grad is not None)
        step, found = training.wire.report().step, training.steps(range(2, STEPS))
    return {
        "kind": kind,
        "spoilt": spoilt,
        "counted": [step, training.wire.report().step],
        "digest": found,
        "races": [] if device is None else device.races[:5],
    }


def fails(recipe: str, placed: str, **options: Any) -> dict[str, Any]:
    """On the device and on the CPU."""
    there = _accident(recipe, _device(placed), placed, **options)
    return {"there": there, "here": _accident(recipe, None, placed, **options)}


def guarded(placed: str) -> dict[str, Any]:
    """Replicas are compared in each step of a training in a stream of the user's, and differ in the last."""
    device = _device(placed)
    training = Training("topk(ratio=0.1)", device, placed, guard_every=1)
    text = ""
    with training.seen(), device.using(device.new_stream()):
        training.steps(range(SAVED, STEPS))
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(training.model.parameters())[0, 0] += 1.0
        try:
            training.step(STEPS)
        except gradwire.RanksDisagree as error:
            text = str(error)
    return {"text": text, "races": device.races[:5]}


SAVES = drawn([*(("topk", placed) for placed in PLACES), ("powersgd", "stream")], 2, "saved")
