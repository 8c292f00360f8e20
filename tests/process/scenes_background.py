"""Scenes of runs whose kernels are not there yet, on real ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api import prepare
from tests.support.models import digest, optimizer_of, perceptron, train

RECIPE = "topk(ratio=0.05)"
NEVER = 10**6


class Compiling:
    """Ends after so many questions."""

    def __init__(self, questions: int) -> None:
        self._answers, self.questions = chain(repeat(False, questions), repeat(True)), 0

    def has_ended(self) -> bool:
        self.questions += 1
        return next(self._answers)


@contextmanager
def lacks_kernels(on_rank: int, steps: int) -> Iterator[Compiling]:
    """Meanwhile models are attached as if a rank needed so many steps to compile. Others have all kernels."""
    compiling = Compiling(steps)
    lacked = compiling if dist.get_rank() == on_rank else None
    with mock.patch.object(prepare, "compilation_for", return_value=lacked):
        yield compiling


def _attached(recipe: str, steps: int | None) -> tuple[Any, Any, Any]:
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    if steps is None:
        return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe)
    with lacks_kernels(1, steps):
        return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe)


def trains() -> dict[str, Any]:
    """Eight steps, of which four are dense."""
    ddp, optimizer, wire = _attached(RECIPE, 3)
    plain = DistributedDataParallel(perceptron())
    train(plain, optimizer_of(plain), range(4))
    dense, settled, report, first = [], [wire.settled], str(wire.report()), ""
    for step in range(8):
        train(ddp, optimizer, range(step, step + 1))
        shown = wire.report()
        dense.append(shown.ratio > 0.9)
        first = digest(ddp) if step == 3 else first
    return {
        "dense": dense,
        "first": first,
        "plain": digest(plain),
        "report": report,
        "settled": [*settled, wire.settled],
        "recipe": wire.report().recipe,
        "digest": digest(ddp),
    }


def _goes_on(saved_after: int) -> dict[str, Any]:
    """Ten steps, of which four are dense, beside a run that loads a state while it awaits kernels itself."""
    ddp, optimizer, wire = _attached(RECIPE, 3)
    train(ddp, optimizer, range(saved_after))
    saved = {"model": ddp.module.state_dict(), "wire": wire.state_dict()}
    model = perceptron(seed=1)
    model.load_state_dict(saved["model"])
    again = DistributedDataParallel(model)
    optimizer_again = optimizer_of(again)
    with lacks_kernels(1, NEVER):
        wire_again = gradwire.attach(again, optimizer_again, RECIPE)
    wire_again.load_state_dict(saved["wire"])
    train(again, optimizer_again, range(saved_after, 10))
    if saved_after < 4:  # what was loaded runs at once, and so it does here
        wire.load_state_dict(saved["wire"])
    train(ddp, optimizer, range(saved_after, 10))
    return {"through": digest(ddp), "resumed": digest(again)}


def switches() -> dict[str, Any]:
    """Another recipe, and none, while kernels are missing."""
    ddp, optimizer, wire = _attached(RECIPE, NEVER)
    train(ddp, optimizer, range(2))
    wire.switch("int8")
    train(ddp, optimizer, range(2, 4))
    recipe = wire.report().recipe
    other, other_optimizer, detached = _attached(RECIPE, NEVER)
    train(other, other_optimizer, range(2))
    detached.detach()
    train(other, other_optimizer, range(2, 4))
    return {"recipe": recipe, "detached": detached.report().recipe}


def momentum() -> bool:
    """`dgc` has the momentum in place of the optimizer."""
    _, _, wire = _attached("dgc(ratio=0.1, momentum=0.9, warmup_steps=0)", NEVER)
    return bool(wire.settled)


def _stored() -> dict[str, Any]:
    """Members that meet in a folder."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    name, count = f"site-{dist.get_rank()}", dist.get_world_size()
    return {"members": gradwire.members.store(folder[0], name, at_least=count, beat_s=2.0)}


def rounds(who: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Two rounds of local steps, the first of which waits for kernels; and the same where they are there."""
    found: dict[str, Any] = {}
    for steps in (0, 3):
        model = perceptron()
        optimizer = optimizer_of(model)
        with lacks_kernels(1, steps) as compiling:
            wire = gradwire.outer(model, optimizer, RECIPE, every=2, **who())
        train(model, optimizer, range(1))
        found["asked before"] = compiling.questions
        train(model, optimizer, range(1, 2))
        found["asked"] = compiling.questions
        train(model, optimizer, range(2, 4))
        found["asked again"] = compiling.questions
        found[f"digest {steps}"] = digest(model)
        wire.detach()
    return found


SCENES = {
    "trains": trains,
    "a state of before": lambda: _goes_on(2),
    "a state of after": lambda: _goes_on(7),
    "switches": switches,
    "momentum": momentum,
    "rounds": lambda: rounds(lambda: {"replicas": dist.group.WORLD}),
    "rounds over a store": lambda: rounds(_stored),
}
