"""Copies of an attached model are copies of a DDP without a hook."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import gradwire
from tests.support.states import own_state

pytestmark = pytest.mark.usefixtures("world_of_one")


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "averaged": lambda ddp: AveragedModel(ddp).module,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "save": _saved,
}
RECIPES = ("topk(ratio=0.1)", "covap", "scalecom(rates='auto')")
"""One that is decided, one that measures and watches every parameter, and one that counts in forward."""


def _ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _backward(ddp: nn.Module) -> list[Tensor]:
    ddp.zero_grad()
    ddp(torch.ones(2, 64)).pow(2).sum().backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_has_no_hook_and_the_model_trains_on(kind: str, recipe: str) -> None:
    plain, ours = _ddp(), _ddp()
    wire = gradwire.attach(ours, recipe=recipe)
    own = dict(ours._forward_pre_hooks)
    user = ours.register_forward_pre_hook(print)
    _backward(ours)
    before = own_state(wire)
    copied = COPIES[kind](ours)
    assert list(copied._forward_pre_hooks.values()) == [print]
    assert not copied._forward_hooks
    user.remove()
    for mine, theirs in zip(_backward(copied), _backward(COPIES[kind](plain)), strict=True):
        assert torch.equal(mine, theirs)
    after = own_state(wire)
    assert after["step"] == before["step"] == 1
    assert all(torch.equal(after["memory"][name], plane) for name, plane in before["memory"].items())
    assert dict(ours._forward_pre_hooks) == own
    _backward(ours)
    assert wire.report().step == 2


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_tells_no_target_of_the_models(kind: str) -> None:
    plain, ours, told = _ddp(), _ddp(), list[int]()
    wire = gradwire.attach(ours, recipe="topk(ratio=0.1)", scaler=torch.amp.GradScaler("cpu"))
    wire.log_to(lambda _metrics, step: told.append(step), every=1)  # no function that pickle knows
    copied = COPIES[kind](ours)
    assert vars(copied).keys() == vars(COPIES[kind](plain)).keys()
    _backward(copied)
    assert not told
    _backward(ours)
    assert len(told) == 1


def test_a_copy_may_be_attached_itself() -> None:
    ours = _ddp()
    wire = gradwire.attach(ours, recipe="topk(ratio=0.1)")
    copied = copy.deepcopy(ours)
    its_wire = gradwire.attach(copied, recipe="dense")
    _backward(copied)
    assert (wire.report().step, its_wire.report().step) == (0, 1)
    again = copy.deepcopy(copied)
    assert not again._forward_pre_hooks


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "save"])
def test_a_copy_of_the_optimizer_is_not_watched(kind: str) -> None:
    ours = _ddp()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    gradwire.attach(ours, optimizer, recipe="topk(ratio=0.1)")
    _backward(ours)
    optimizer.step()
    ddp, copied = COPIES[kind]((ours, optimizer))
    assert not copied._optimizer_step_post_hooks
    before = [p.detach().clone() for p in ddp.parameters()]
    _backward(ddp)
    copied.step()
    moved = [not torch.equal(p, old) for p, old in zip(ddp.parameters(), before, strict=True)]
    assert all(moved)
    for parameter, its in zip(ours.parameters(), before, strict=True):
        assert torch.equal(parameter, its)
