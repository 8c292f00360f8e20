"""Real gloo ranks: what users do around training, as public reports have it, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import gradwire
from tests.process.attached_models import Made, ddp, plain
from tests.process.fsdp_models import bits, loss_of, sharded, train, whole
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.rest]


def fsdp(recipe: str) -> Made:
    model = sharded()
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, gather="int8")


def outer(recipe: str) -> Made:
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.outer(model, optimizer, recipe, every=2, delay=1, replicas=dist.group.WORLD)
    return model, optimizer, wire


KINDS: dict[str, Callable[[], Made]] = {
    "ddp": partial(ddp, "int4"),
    "plain": partial(plain, "topk(ratio=0.1)"),
    "fsdp": partial(fsdp, "int4"),
    "outer": partial(outer, "int4"),
}


def trained(build: Callable[[], Made], *, evaluates: bool) -> str:
    """Masters after five steps, with evaluations before the first one or without."""
    torch.manual_seed(0)
    model, optimizer, wire = build()
    if evaluates:
        model.eval()
        with torch.no_grad():
            for step in range(3):
                model(batch(10 + step)[0])
        model.train()
    train(model, optimizer, range(5))
    masters = bits(whole(model))  # before a last round makes them those of all
    wire.detach()
    return masters


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_before_the_first_step_changes_no_bit(two: Ranks, kind: str) -> None:
    assert two(trained, KINDS[kind], evaluates=True) == two(trained, KINDS[kind], evaluates=False)


def tensors_of(saved: object) -> list[str]:
    """Fingerprints."""
    if isinstance(saved, Tensor):
        return [bits(saved.to_local() if isinstance(saved, DTensor) else saved)]
    parts = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list | tuple) else ()
    return [found for each in parts for found in tensors_of(each)]


@dataclass(frozen=True)
class Saved:
    """Tensors of a state when it was taken and three steps later, and of the state of that moment."""

    then: list[str]
    later: list[str]
    now: list[str]


def saved_beside(build: Callable[[], Made]) -> Saved:
    """Another thread would write it later."""
    model, optimizer, wire = build()
    train(model, optimizer, range(3))
    state = wire.state_dict()
    then = tensors_of(state)
    train(model, optimizer, range(3, 6))
    later, now = tensors_of(state), tensors_of(wire.state_dict())
    wire.detach()
    return Saved(then, later, now)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_written_later_has_the_values_of_its_moment(two: Ranks, kind: str) -> None:
    for found in two(saved_beside, KINDS[kind]):
        assert found.later == found.then
        assert found.now != found.then


def gradients_in_parts(recipe: str | None, how: str) -> list[Tensor]:
    """Of this rank's shards, where a loop accumulates in one of FSDP2's own ways; `None` is stock FSDP2."""
    model = sharded()
    if recipe is not None:
        gradwire.attach(model, None, recipe)
    for micro in range(2):
        is_last = micro == 1
        if how == "last":
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
        elif how == "some":
            model.blocks[0].set_requires_gradient_sync(is_last, recurse=False)
        else:
            model.set_requires_all_reduce(is_last)
        loss_of(model, micro).backward()
    grads = (each.grad for each in model.parameters())
    return [each.to_local() for each in grads if isinstance(each, DTensor) and each.to_local().numel()]


@pytest.mark.parametrize("how", ["last", "some", "all-reduce"])
@pytest.mark.parametrize("recipe", ["dense", "int8"])
def test_fsdp_2_accumulates_in_its_own_ways(two: Ranks, recipe: str, how: str) -> None:
    ours, stock = two(gradients_in_parts, recipe, how), two(gradients_in_parts, None, how)
    for found, others in zip(ours, stock, strict=True):
        largest = max(float(each.abs().max()) for each in others)
        apart = max(float((one - other).abs().max()) for one, other in zip(found, others, strict=True))
        # int8 rounds each scatter by 1/127 of a block's largest at most, and two are added up.
        assert apart < largest * (1e-6 if recipe == "dense" else 2 / 127)
