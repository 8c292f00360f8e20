"""What frameworks hand out: fakes of the same shape are unwrapped, and what cannot be carried is refused.

The frameworks themselves are in tests/integrations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import gradwire
from gradwire.codec.cast import cast
from gradwire.errors import GradwireWarning
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import reduce
from gradwire.recipes import Composition
from gradwire.sources.unwrap import ddp_of, optimizers_of, scaler_of
from tests.support.states import own_state

pytestmark = pytest.mark.usefixtures("world_in_company")


class FabricModule(nn.Module):
    """As lightning.fabric's: the wrapped module and the user's are both submodules."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = forward_module, original

    def forward(self, x: Any) -> Any:
        """Through the wrapped one."""
        return self._forward_module(x)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As Accelerate's: a subclass that never calls the constructor of its base."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self) -> Any:
        """Of the one inside."""
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        """By the one inside."""
        self.optimizer.step(closure)


class FabricOptimizer:
    """As Lightning's two: takes on the class of what it wraps, and hands every attribute on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (FabricOptimizer, type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one inside."""
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Lookahead(torch.optim.Optimizer):
    """An optimizer in its own right that steps another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def test_ddp_is_found_inside_the_wrappers() -> None:
    ddp = _ddp()
    compiled: Any = torch.compile(ddp, backend="eager")
    for model in (ddp, compiled, FabricModule(ddp, ddp.module), FabricModule(compiled, ddp.module)):
        assert ddp_of(model) is ddp


def test_optimizers_are_found_inside_the_wrappers() -> None:
    plain = _sgd(nn.Linear(2, 2))
    inside: Any = FabricOptimizer(plain)
    assert isinstance(inside, torch.optim.SGD)  # or it would not be the shape that it stands for
    for given in (plain, AcceleratedOptimizer(plain), inside, AcceleratedOptimizer(inside)):
        assert optimizers_of(given) == (plain,)
        assert optimizers_of([given, plain]) == (plain, plain)
    assert optimizers_of(None) == ()


def test_an_optimizer_that_steps_another_is_itself() -> None:
    lookahead = Lookahead(_sgd(nn.Linear(2, 2)))
    assert optimizers_of(lookahead) == (lookahead,)


def test_the_scaler_comes_along_with_accelerates_optimizer() -> None:
    plain, scaler = _sgd(nn.Linear(2, 2)), torch.amp.GradScaler("cpu")
    assert scaler_of(AcceleratedOptimizer(plain, scaler)) is scaler
    assert scaler_of([plain, AcceleratedOptimizer(plain, scaler)]) is scaler
    assert scaler_of(AcceleratedOptimizer(plain)) is None
    assert scaler_of(plain) is None


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (DataParallel, "start one process per device with torchrun"),
        (fully_shard, "auto is not for FSDP2's own scatters"),
        (replicate, "DDPSequential, was made by replicate()"),
        (_sgd, "the model comes first, then the optimizer"),
        (lambda _module: "topk", "need a module, got str"),
    ],
)
def test_a_model_that_cannot_be_carried_is_refused_with_what_to_do(
    wrap: Callable[[Any], Any], says: str
) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the text is compared below without escapes
        gradwire.attach(model)
    assert says in str(caught.value)


@pytest.mark.parametrize("wrap", [lambda module: module, partial(torch.compile, backend="eager")])
def test_a_model_without_a_wrapper_is_refused_only_if_there_are_other_ranks(
    wrap: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4)))
    gradwire.attach(model).detach()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="Sequential is a plain module: wrap it in DistributedDataParallel"):
        gradwire.attach(model)


def test_the_older_fsdp_is_refused_too() -> None:
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(sharded)  # all of its own constructor that needs no accelerator
    with pytest.raises(ValueError, match="FullyShardedDataParallel, is sharded by the older FSDP"):
        ddp_of(sharded)


def test_deepspeeds_engine_is_refused_by_its_name() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ValueError, match="DeepSpeed's, which reduces gradients itself"):
        ddp_of(type("Pipeline", (engine,), {})())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda _ddp: "topk", "write attach(model, optimizer, 'topk')"),
        (lambda _ddp: gradwire.recipe("topk"), "write attach(model, optimizer, recipe)"),
        (lambda _ddp: torch.amp.GradScaler("cpu"), "attach(model, optimizer, scaler=scaler)"),
        (lambda ddp: torch.optim.lr_scheduler.StepLR(_sgd(ddp), 1), "got StepLR; pass the optimizer that"),
        (lambda ddp: ddp.parameters(), "got a list of Parameter; pass the optimizer itself"),
        (lambda _ddp: [], "got a list of nothing"),
        (lambda ddp: ddp.module, "an optimizer or a list of them, got Sequential"),
        (lambda ddp: [_sgd(ddp), 7], "an optimizer or a list of them, got int"),
        (lambda _ddp: _sgd(_ddp.__class__(nn.Linear(2, 2))), "SGD has no parameter of this model"),
    ],
)
def test_what_is_no_optimizer_is_refused_before_anything_is_registered(
    wrong: Callable[[DistributedDataParallel], Any], says: str
) -> None:
    ddp = _ddp()
    given = wrong(ddp)
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the text is compared below without escapes
        gradwire.attach(ddp, given, "int8")
    assert says in str(caught.value)
    assert (ddp._comm_hooks, len(ddp._forward_hooks), len(ddp._forward_pre_hooks)) == ([], 0, 0)
    gradwire.attach(ddp, _sgd(ddp), "int8")


def test_a_policy_that_matches_nothing_is_refused_before_anything_is_registered() -> None:
    ddp = _ddp()
    with pytest.raises(ValueError, match=r"no parameter matches '\*.wieght'"):
        gradwire.attach(ddp, None, "int8", policy={"*.wieght": "fp16"})
    assert ddp._comm_hooks == []


def _step(model: nn.Module, *optimizers: Any) -> None:
    model(torch.ones(2, 64)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize(
    "wrap", [lambda ddp: FabricModule(ddp, ddp.module), partial(torch.compile, backend="eager")]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler, of its own doing
def test_gradients_of_a_wrapped_model_are_carried(wrap: Callable[[Any], Any]) -> None:
    ddp = _ddp()
    model, optimizer = wrap(ddp), AcceleratedOptimizer(_sgd(ddp))
    wire = gradwire.attach(model, optimizer, "topk(0.1)")
    _step(model, optimizer)
    assert wire.report().step == 1
    _step(model)  # the optimizer inside is followed: this step is left out
    ddp.zero_grad()
    _step(model, optimizer)
    assert wire.report().step == 2


def test_of_several_optimizers_each_is_watched_and_asked_about_its_own_parameters() -> None:
    ddp = _ddp()
    first = torch.optim.SGD(ddp.module[0].parameters(), lr=0.25)
    second = torch.optim.Adam(ddp.module[1].parameters(), lr=0.125)
    wire = gradwire.attach(ddp, [first, second], "gcomp")
    _step(ddp, first, second)
    replicas = wire.attached.backward.reducer.env.replicas
    found = {name: replicas(name) for name in ("0.weight", "1.weight")}
    assert [(each.optimizer, each.group["lr"]) for each in found.values() if each is not None] == [
        (torch.optim.SGD, 0.25),
        (torch.optim.Adam, 0.125),
    ]


def test_several_optimizers_that_step_together_or_in_turn_are_no_accumulation() -> None:
    ddp = _ddp()
    optimizers = [_sgd(ddp.module[0]), _sgd(ddp.module[1])]
    gradwire.attach(ddp, optimizers, "topk(0.1)")
    for _ in range(3):
        _step(ddp, *optimizers)  # a warning would be an error here
        for optimizer in optimizers:
            _step(ddp, optimizer)
    ddp(torch.ones(2, 64)).mean().backward()
    with pytest.warns(GradwireWarning, match="2 backward passes were exchanged before one optimizer step"):
        _step(ddp, *optimizers)


def test_a_composition_of_ones_own_runs_and_its_state_is_taken_up_again() -> None:
    def mine() -> Composition:
        return Composition(remember(reduce(cast(torch.float16))), text="half_with_memory")

    ddp, again = _ddp(), _ddp()
    wire = gradwire.attach(ddp, _sgd(ddp), mine())
    _step(ddp)
    assert wire.report().recipe == "half_with_memory"
    saved = own_state(wire)
    assert saved["plan"] == "half_with_memory"
    wire_again = gradwire.attach(again, _sgd(again), mine())
    wire_again.load_state_dict(saved)
    memory = own_state(wire_again)["memory"]
    assert memory
    assert all(torch.equal(memory[name], saved["memory"][name]) for name in memory)
    other = _ddp()
    with pytest.raises(ValueError, match="unknown recipe 'half_with_memory'"):
        gradwire.attach(other, _sgd(other), "int8").load_state_dict(saved)


def test_the_handle_prints_as_one_line() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, _sgd(ddp), "fp16")
    assert repr(wire) == "Wire(fp16, step 0)"
    _step(ddp)
    # In a world of one, bytes are those of no message at all.
    assert repr(wire) == "Wire(fp16, step 1)"
    adaptive = _ddp()
    assert repr(gradwire.attach(adaptive, _sgd(adaptive))) == "Wire(auto, measuring, step 0)"
