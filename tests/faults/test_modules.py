"""Real gloo ranks: a model that changes under gradwire, or a pass that breaks off, is an error in words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.process.sharded_models import attached, sharded
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.raised import Raised, raised
from tests.support.ranks import TIMEOUT_S
from tests.support.tiers import cases, rest
from tests.support.world import Ranks, lose_groups

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Step:
    """What a backward pass has raised, and how many steps count after it."""

    raised: Raised
    steps: int


def _backward(model: nn.Module, step: int) -> None:
    inputs, targets = batch(step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def assigned(inner: Any) -> None:
    inner.load_state_dict({name: each.clone() for name, each in inner.state_dict().items()}, assign=True)


def replaced(inner: Any) -> None:
    part = inner[2] if isinstance(inner, nn.Sequential) else inner.blocks[1]
    part.weight = nn.Parameter(part.weight.detach().clone())


def appended(inner: Any) -> None:
    if isinstance(inner, nn.Sequential):
        inner.append(nn.Linear(8, 8))
    else:
        inner.blocks[1].more = nn.Linear(8, 8)


Change = Callable[[Any], None]
CHANGED: list[tuple[Change, str, str]] = [
    (assigned, "ddp", "'4.bias' was replaced; '4.weight' was replaced; '2.bias' was replaced; and 3 more."),
    (replaced, "plain", "'2.weight' was replaced."),
    (appended, "sharded", "'blocks.1.more.weight' was added; 'blocks.1.more.bias' was added."),
    (
        assigned,
        "sharded",
        "'norm.bias' was replaced; 'norm.weight' was replaced; 'never.bias' was replaced; and 8 more",
    ),
    (replaced, "sharded", "'blocks.1.weight' was replaced."),
]
"""`tests/unit/sources/test_same_parameters.py` has all changes, one rank by itself."""


def _attached(source: str) -> tuple[nn.Module, nn.Module, gradwire.Wire]:
    """What is attached, and what changes: the module inside DDP, or the same."""
    if source == "sharded":
        model = sharded()
        return model, model, attached(model, "topk(ratio=0.1)")[1]
    inner = perceptron()
    own = dist.new_group([0, 1])  # DDP's own collectives are lost, too, where one rank does not come
    model, replicas = inner, dist.group.WORLD
    if source == "ddp":
        model, replicas = DistributedDataParallel(inner, find_unused_parameters=True, process_group=own), None
    wire = gradwire.attach(model, optimizer_of(model), "topk(ratio=0.1)", replicas=replicas)
    return model, inner, wire


def changed(change: Change, source: str, ranks: tuple[int, ...] = (0, 1)) -> Step:
    """The model changes on these ranks after a step."""
    model, inner, wire = _attached(source)
    for step in (0, 1):  # before its second forward pass DDP has a collective of its own
        _backward(model, step)
    if dist.get_rank() in ranks:
        change(inner)
    found = Step(raised(partial(_backward, model, 2)), wire.report().step)
    if len(ranks) == 1:
        lose_groups()
    return found


@pytest.mark.parametrize(("change", "source", "says"), cases(CHANGED, but=CHANGED[:3]))
def test_parameters_that_changed_are_named_on_all_ranks_before_the_next_exchange(
    two: Ranks, change: Change, source: str, says: str
) -> None:
    for found in two(changed, change, source):
        assert found.raised.kind == "ValueError"
        assert says in found.raised.text
        assert "use load_state_dict without assign=True" in found.raised.text
        assert found.steps == 2


@pytest.mark.parametrize(
    ("change", "source", "name"),
    [
        (replaced, "plain", "'2.weight'"),
        (appended, "ddp", "'5.weight'"),
        (appended, "sharded", "'blocks.1.more.weight'"),
    ],
)
def test_a_change_on_one_rank_is_named_on_the_ranks_that_wait(
    two: Ranks, change: Change, source: str, name: str
) -> None:
    waits, refuses = two(changed, change, source, (1,))
    assert (waits.raised.kind, refuses.raised.kind) == ("RanksDisagree", "ValueError")
    assert name in refuses.raised.text
    assert "rank 0: a training step; rank 1: a forward pass that it refuses" in waits.raised.text
    assert name in waits.raised.text
    assert waits.raised.after_s < TIMEOUT_S / 2, "long before the timeout"
    assert waits.steps == 2


def _boom(_gradient: Tensor) -> None:
    raise RuntimeError("boom")


def _pass_that_breaks_off(model: nn.Module, step: int) -> None:
    """Before the first gradient."""
    outputs = model(batch(step)[0])
    outputs.register_hook(_boom)
    outputs.sum().backward()


def _plain(recipe: str = "topk(ratio=0.1)") -> tuple[nn.Module, gradwire.Wire]:
    model = perceptron()
    return model, gradwire.attach(model, optimizer_of(model), recipe, replicas=dist.group.WORLD)


@dataclass(frozen=True)
class BrokeOff:
    """Passes from the one on that breaks off, on rank 0, or in which it is missed; and steps that count."""

    passes: list[Raised]
    steps: int


def broke_off(recipe: str, buckets: int) -> BrokeOff:
    """The user catches an exception in the middle of rank 0's backward pass, and goes on."""
    model, wire = _plain(recipe)
    several = patch("gradwire.sources.plain.cap_for", return_value=1024)
    kept = list[Exception]()  # with their tracebacks, as notebooks keep the last one

    def keeping(step: int) -> None:
        try:
            _backward(model, step)
        except Exception as error:
            kept.append(error)
            raise

    with several if buckets > 1 else nullcontext():
        _backward(model, 0)
        if dist.get_rank() == 1:
            passes = [raised(partial(keeping, 1))]
        else:
            handle = model[2].register_forward_hook(lambda _m, _i, out: out.register_hook(_boom) and None)  # type: ignore[index, operator]
            passes = [raised(partial(keeping, 1))]
            handle.remove()
            passes += [raised(partial(keeping, step)) for step in (2, 3)]
    found = BrokeOff(passes, wire.report().step)
    dist.barrier()
    lose_groups()
    return found


@pytest.mark.parametrize("recipe", rest(["dense", "topk(ratio=0.1)"], but=["topk(ratio=0.1)"]))
@pytest.mark.parametrize("buckets", rest([1, 4], but=[4]))
def test_after_a_caught_exception_no_pass_completes_another_step(
    two: Ranks, recipe: str, buckets: int
) -> None:
    broke, waited = two(broke_off, recipe, buckets)
    assert [each.kind for each in broke.passes] == ["RuntimeError", "GradwireError", "GradwireError"]
    for each in broke.passes[1:]:
        assert each.text.startswith("a backward pass broke off before all gradients were there")
    [heard] = waited.passes
    assert heard.kind == "RanksDisagree", "and not the timeout"
    assert "rank 0: a backward pass after one that broke off; rank 1: a training step" in heard.text
    assert broke.steps == waited.steps == 1


def before_any_gradient() -> BrokeOff:
    """All ranks catch an exception before the first gradient: nothing of that pass was sent."""
    model, wire = _plain()
    passes = [raised(partial(_pass_that_breaks_off, model, 0))]
    hidden: Tensor = batch(1)[0]
    for layer in model:  # type: ignore[attr-defined]  # round the model's own forward pass
        hidden = layer(hidden)
    passes.append(raised(hidden.sum().backward))
    passes.append(raised(partial(_backward, model, 2)))
    return BrokeOff(passes, wire.report().step)


def test_a_pass_that_broke_off_before_its_first_gradient_has_begun_no_step(two: Ranks) -> None:
    for found in two(before_any_gradient):
        assert [str(each) for each in found.passes] == ["RuntimeError: boom", "", ""]
        assert found.steps == 2


def before_any_gradient_of_one() -> Step:
    """On rank 0 alone, whose next pass is one step behind."""
    model, wire = _plain()
    _backward(model, 0)
    if dist.get_rank() == 0:
        raised(partial(_pass_that_breaks_off, model, 1))
    found = Step(raised(partial(_backward, model, 2)), wire.report().step)
    lose_groups()
    return found


def test_a_pass_of_one_rank_that_broke_off_before_its_first_gradient_pairs_with_no_other(two: Ranks) -> None:
    for found in two(before_any_gradient_of_one):
        assert found.raised.kind == "RanksDisagree"
        for rank, what in enumerate(
            (
                "a backward pass after one that broke off before its first gradient at step 1",
                "a training step",
            )
        ):
            assert f"rank {rank}: {what}" in found.raised.text
        assert found.raised.after_s < TIMEOUT_S / 2, "long before the timeout"
        assert found.steps == 1


def before_any_gradient_without_sync() -> Step:
    """Rank 0 alone catches an exception inside `no_sync`: no step is behind another."""
    model, wire = _plain()
    with wire.no_sync():
        raised(partial(_pass_that_breaks_off if dist.get_rank() == 0 else _backward, model, 0))
    return Step(raised(partial(_backward, model, 1)), wire.report().step)


def test_a_pass_that_would_not_have_been_exchanged_may_break_off(two: Ranks) -> None:
    for found in two(before_any_gradient_without_sync):
        assert (str(found.raised), found.steps) == ("", 1)


def _replace_frozen(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight + 1, requires_grad=False)


def _add_frozen(model: Any) -> None:
    model.append(nn.Linear(8, 8).requires_grad_(False))


def guarded(change: Change | None) -> Raised:
    """By the next pass where rank 1 alone changes what is frozen, under a guard."""
    model: Any = perceptron()
    model[0].requires_grad_(False)
    gradwire.attach(model, optimizer_of(model), "dense", replicas=dist.group.WORLD, guard_every=1)
    _backward(model, 0)
    if change and dist.get_rank() == 1:
        change(model)
    return raised(partial(_backward, model, 1))


def test_the_guard_sees_frozen_parameters_as_they_are_now(two: Ranks) -> None:
    for heard in two(guarded, _replace_frozen):
        assert heard.kind == "RanksDisagree"
        assert "before step 1: '0.weight' on rank 1 (" in heard.text
    for heard in two(guarded, _add_frozen):
        assert heard.kind == "RanksDisagree"
        assert "the parameters that guard_every compares: rank 0: 6: " in heard.text
        assert "rank 1: 8: " in heard.text
    assert [str(heard) for heard in two(guarded, None)] == ["", ""]
