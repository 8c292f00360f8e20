"""Real gloo ranks: whatever memory a loop puts behind its gradients, parameters or θ₀, averaging goes on.

A loop that puts other memory there is beside the same loop without: plain DDP's where the recipe is dense.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.process import fsdp_models, sharded_models
from tests.support.models import SHAPE, batch, optimizer_of, same
from tests.support.tiers import rest
from tests.support.world import Ranks, lose_groups

pytestmark = pytest.mark.process


Act = Callable[[nn.Module], object]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS, ONCE = 5, 2
"""Steps of a run, and the one in which something is done."""
LIMIT = 0.01
RECIPES = ("dense", "int4", "topk(ratio=0.05)")


class Varied(nn.Module):
    """A convolution with statistics, two square matrices, one stored by columns, and no elements at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(128, 128)
        self.second = nn.Linear(128, 128)
        self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(128, SHAPE[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.conv(inputs.view(-1, 2, 4, 4))).flatten(1)
        hidden = torch.tanh(self.second(torch.tanh(self.first(hidden)))) + self.nothing.sum()
        out: Tensor = self.head(hidden)
        return out


def varied() -> nn.Module:
    torch.manual_seed(7)
    return Varied()


# -- idioms


def on_each(function: Callable[[nn.Parameter], object], model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            function(parameter)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _here(parameter: nn.Parameter) -> Tensor:
    """The very tensor in which a sharded gradient has this rank's part."""
    grad = _grad(parameter)
    assert isinstance(grad, DTensor)
    found: Tensor = grad._local_tensor
    return found


def clamp_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clamp(-LIMIT, LIMIT)


def clamp(tensor: Tensor) -> None:
    tensor.detach().clamp_(-LIMIT, LIMIT)


def replace(parameter: nn.Parameter) -> None:
    parameter.grad = _grad(parameter).clamp(-LIMIT, LIMIT)


def cast_alone(parameter: nn.Parameter) -> None:
    kept = _grad(parameter).double()
    parameter.grad = None
    parameter.grad = kept.float()


def set_elsewhere(tensor: Tensor) -> None:
    tensor.set_(tensor.clone())


def permute(tensor: Tensor) -> None:
    """The same values, in the opposite order of memory."""
    dims = tuple(reversed(range(tensor.dim())))
    tensor.data = tensor.data.permute(dims).contiguous().permute(dims)


def is_square(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]


def turn(tensor: Tensor) -> None:
    """A transposed matrix, in the same memory."""
    if is_square(tensor):
        tensor.data = tensor.data.t()


def turn_values(tensor: Tensor) -> None:
    if is_square(tensor):
        tensor.copy_(tensor.t().clone())


def cast(model: nn.Module) -> None:
    model.double()
    model.float()


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def reorder(model: nn.Module) -> None:
    channels_last(model)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def hook(function: Callable[[nn.Parameter], None], model: nn.Module) -> None:
    """From now on, in hooks that are registered after those of gradwire."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]


def nothing(_model: nn.Module) -> None:
    """The memory stays, and so do the values."""


def on_grads(function: Callable[[Tensor], object]) -> Act:
    return partial(on_each, lambda parameter: function(_grad(parameter)))


clamp_all = on_grads(clamp)
IDIOMS: dict[str, tuple[Act, Act]] = {
    "p.grad.data = ": (on_grads(clamp_data), clamp_all),
    "p.grad = ": (partial(on_each, replace), clamp_all),
    "p.grad cast": (partial(on_each, cast_alone), nothing),
    "p.grad.set_": (on_grads(set_elsewhere), nothing),
    "permuted": (on_grads(permute), nothing),
    "transposed": (on_grads(turn), on_grads(turn_values)),
    "module cast": (cast, nothing),
    "module reordered": (reorder, nothing),
    "by a hook": (
        partial(hook, replace),
        partial(hook, lambda parameter: clamp(_grad(parameter))),
    ),
}
"""By name: how a loop does it, and how the values come about where they are."""


@dataclass(frozen=True)
class When:
    """Whether it is done after the step, or before; whether gradients are set to zeros, or to `None`."""

    after_step: bool
    keeps: bool

    def __str__(self) -> str:
        return f"{'after' if self.after_step else 'before'} the step, {'zeros' if self.keeps else 'None'}"


WHEN = (
    When(after_step=False, keeps=False),
    When(after_step=False, keeps=True),
    When(after_step=True, keeps=True),
)

# -- loops


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, act: Act, when: When) -> list[Tensor]:
    """Train; return all parameters."""
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not when.keeps)
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        if step == ONCE and not when.after_step:
            act(model)
        optimizer.step()
        if step == ONCE and when.after_step:
            act(model)
    return [each.detach().clone() for each in model.parameters()]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@cache
def under_ddp(act: Act, when: When) -> list[Tensor]:
    """Without gradwire."""
    model = DistributedDataParallel(varied())
    return loop(model, momentum(model), act, when)


def made(source: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and what `attach` needs for it."""
    if source == "plain":
        return varied(), {"replicas": dist.group.WORLD}
    if source == "plain, on nodes":
        return varied(), {"replicas": dist.group.WORLD, "nodes": [[0, 1], [2, 3]]}
    return DistributedDataParallel(varied(), gradient_as_bucket_view=source == "ddp, views"), {}


def attached(source: str, recipe: str, act: Act, when: When) -> list[Tensor]:
    model, options = made(source)
    optimizer = momentum(model)
    gradwire.attach(model, optimizer, recipe, **options)
    return loop(model, optimizer, act, when)


@cache
def in_place(source: str, recipe: str, act: Act, when: When) -> list[Tensor]:
    return attached(source, recipe, act, when)


def alike(tensors: list[Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    flat = torch.cat([each.double().flatten() for each in tensors])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return all(torch.equal(flat, other) for other in others)


def beside(source: str, recipe: str) -> dict[str, str]:
    """By idiom and time, in which way a run differs from its twin."""
    wrong = {}
    for name, (act, twin) in IDIOMS.items():
        if name == "module cast" and source.startswith("ddp"):
            continue  # it takes DDP's own hooks away: see below
        for when in WHEN:
            found = attached(source, recipe, act, when)
            if not alike(found):
                wrong[f"{name}, {when}"] = "replicas are apart"
            elif not same(found, in_place(source, recipe, twin, when)):
                wrong[f"{name}, {when}"] = "not as in place"
            elif recipe == "dense" and not same(found, under_ddp(twin, when)):
                wrong[f"{name}, {when}"] = "not as under DDP"
    return wrong


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)"]))
@pytest.mark.parametrize("source", rest(["plain", "ddp", "ddp, views"], but=["ddp, views"]))
def test_other_memory_behind_gradients_changes_no_bit(two: Ranks, source: str, recipe: str) -> None:
    # Zero tolerance: in place the same numbers are computed, and two addends commute, so dense is DDP.
    assert two(beside, source, recipe) == [{}, {}]


@pytest.mark.rest
def test_so_it_is_on_nodes(four: Ranks) -> None:
    assert four(beside, "plain, on nodes", "topk(ratio=0.05)") == [{}] * 4


def unseen_hooks(recipe: str) -> bool:
    """Whether replicas stay alike where no output is seen, and hooks come after those of gradwire."""
    model = varied()
    optimizer = optimizer_of(model)
    gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)
    hook(replace, model)
    for step in range(STEPS):
        inputs, targets = batch(2 * step + dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model.forward(inputs), targets).backward()
        optimizer.step()
    return alike([each.detach() for each in model.parameters()])


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)"]))
def test_hooks_that_come_after_ours_part_nothing_where_no_output_is_seen(two: Ranks, recipe: str) -> None:
    assert two(unseen_hooks, recipe) == [True, True]


@dataclass(frozen=True)
class Fused:
    """Whether replicas are alike, and the largest difference between two runs."""

    alike: bool
    apart: float


def fused() -> Fused:
    """A fused optimizer takes a gradient's memory to be in the order of the parameter's."""
    trained = []
    for act in (channels_last, nothing):
        model = varied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        gradwire.attach(model, optimizer, "dense", replicas=dist.group.WORLD)
        trained.append(loop(model, optimizer, act, WHEN[0]))
    apart = max(float((a - b).abs().max()) for a, b in zip(*trained, strict=True) if a.numel())
    return Fused(all(map(alike, trained)), apart)


def test_a_fused_optimizer_finds_gradients_in_the_order_of_the_parameters(two: Ranks) -> None:
    # A convolution adds up in another order there: a few roundings (eps = 1.2e-7) of numbers below 1 in each
    # of five steps. Gradients in the wrong order are off by 1e-2.
    for found in two(fused):
        assert found.alike
        assert found.apart < 1e-6


class Scaled(nn.Module):
    """Weights that could be a convolution's, whose gradient is `inputs` + `weight`, element by element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(64, 32, 3, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs).sum() + 0.5 * (self.weight * self.weight).sum()


def bounded() -> list[Tensor]:
    """Weights by a recipe whose error bound for each element follows from the parameter, in two orders."""
    trained = []
    for act in (channels_last, nothing):
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        gradwire.attach(model, optimizer, "gcomp", replicas=dist.group.WORLD)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(64, 32, 3, 3, generator=generator)).backward()
            optimizer.step()
            if step == ONCE:
                act(model)
        trained.append(model.weight.detach())
    return trained


def test_error_bounds_are_those_of_the_elements_in_whatever_order_a_parameter_is(two: Ranks) -> None:
    (one, turned), others = two(bounded)
    assert torch.equal(one, turned)
    assert same([one, turned], others), "replicas are alike"


def cast_under_ddp(source: str) -> bool:
    """Whether this rank hears that DDP's own hooks are lost."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        attached(source, "dense", cast, WHEN[0])
    return any("was cast or moved after it was wrapped" in str(each.message) for each in heard)


@pytest.mark.parametrize("source", ["ddp", "ddp, views"])
def test_all_ranks_hear_where_a_cast_has_taken_the_hooks_of_ddp(two: Ranks, source: str) -> None:
    assert two(cast_under_ddp, source) == [True, True]


def reordered_on_one(source: str) -> str:
    """The error of this rank, where rank 1 alone has put its parameters in another order."""
    try:
        attached(source, "dense", channels_last if dist.get_rank() == 1 else nothing, WHEN[0])
    except (ValueError, gradwire.RanksDisagree) as error:
        heard = f"{type(error).__name__}: {error}"
    else:
        heard = ""
    dist.barrier()  # a rank that ends would be another error
    lose_groups()
    return heard


@pytest.mark.parametrize("source", rest(["ddp", "ddp, views"], but=["ddp"]))
def test_all_ranks_hear_where_parameters_under_ddp_are_in_another_order(two: Ranks, source: str) -> None:
    other, here = two(reordered_on_one, source)
    assert "ValueError: parameters of this model have changed since attach: 'conv.weight' has strides" in here
    assert "RanksDisagree" in other
    assert "a forward pass that it refuses" in other


# -- shards

ON_SHARDS: dict[str, tuple[Act, Act]] = {
    "p.grad = ": (partial(on_each, replace), partial(on_each, lambda p: clamp(_here(p)))),
    "the part's data": (
        partial(on_each, lambda p: clamp_data(_here(p))),
        partial(on_each, lambda p: clamp(_here(p))),
    ),
    "the part's set_": (partial(on_each, lambda p: set_elsewhere(_here(p))), nothing),
    "p.grad cast": (partial(on_each, cast_alone), nothing),
    "module cast": (cast, nothing),
}


@cache
def sharded(recipe: str, act: Act, when: When) -> Tensor:
    """All elements of the parameters; with "native" as recipe as FSDP itself averages them between nodes."""
    if recipe == "native":
        model = sharded_models.sharded(sharded_models.mesh())
        assert isinstance(model, FSDPModule)
        model.set_reduce_scatter_unused_params(True)  # zeros, as ours, not no gradient
        optimizer = optimizer_of(model)
    else:
        model = sharded_models.sharded()
        optimizer, _wire = sharded_models.attached(model, recipe)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not when.keeps)
        fsdp_models.loss_of(model, step).backward()
        if step == ONCE and not when.after_step:
            act(model)
        optimizer.step()
        if step == ONCE and when.after_step:
            act(model)
    return fsdp_models.whole(model)


def beside_native(recipe: str) -> dict[str, str]:
    wrong = {}
    for name, (act, twin) in ON_SHARDS.items():
        for when in WHEN:
            found = sharded(recipe, act, when)
            if not alike([found]):
                wrong[f"{name}, {when}"] = "replicas are apart"
            elif not torch.equal(found, sharded(recipe, twin, when)):
                wrong[f"{name}, {when}"] = "not as in place"
            elif recipe == "dense" and not torch.equal(found, sharded("native", act, when)):
                wrong[f"{name}, {when}"] = "not as FSDP"
    return wrong


@pytest.mark.rest
@pytest.mark.parametrize("recipe", RECIPES)
def test_so_it_is_with_shards(four: Ranks, recipe: str) -> None:
    assert four(beside_native, recipe) == [{}] * 4


# -- local steps


class Moving(torch.optim.Optimizer):
    """SGD with a limit, which puts new memory behind all that it is given; or `in_place`."""

    def __init__(self, parameters: list[nn.Parameter], *, in_place: bool) -> None:
        super().__init__(parameters, {"lr": 0.7})
        self._in_place = in_place

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if self._in_place:
                    _grad(parameter).clamp_(-LIMIT, LIMIT)
                    parameter.copy_(parameter - group["lr"] * _grad(parameter))
                else:
                    clamp_data(_grad(parameter))
                    parameter.data = parameter.data - group["lr"] * _grad(parameter)


def renew(model: nn.Module) -> None:
    """New memory behind parameters, and new statistics."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())
    cast(model)


def rounds(recipe: str, delay: int, act: Act, *, moves: bool) -> list[Tensor]:
    model = varied()
    optimizer = optimizer_of(model)
    make: Make = partial(Moving, in_place=not moves)
    wire = gradwire.outer(
        model, optimizer, recipe, replicas=dist.group.WORLD, every=2, delay=delay, outer=make
    )
    for step in range(9):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        act(model)
    with wire.shared_parameters():
        return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def beside_rounds(recipe: str) -> dict[str, str]:
    wrong = {}
    for delay in (0, 1):
        twin = rounds(recipe, delay, nothing, moves=False)
        for name, act, moves in (("the outer one", nothing, True), ("the loop", renew, False)):
            found = rounds(recipe, delay, act, moves=moves)
            if not alike(found):
                wrong[f"{name}, delay {delay}"] = "shared parameters are apart"
            elif not same(found, twin):
                wrong[f"{name}, delay {delay}"] = "not as in place"
    return wrong


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)"]))
def test_an_outer_optimizer_may_move_shared_parameters_and_a_loop_its_own(two: Ranks, recipe: str) -> None:
    assert two(beside_rounds, recipe) == [{}, {}]
