"""One attached model in a world of one: the hook, the handle, and what cannot be carried."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

import numba
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireWarning, TransportError
from gradwire.kernels import compiler
from gradwire.members.base import Card, Entry, Roster
from gradwire.planning.costs import CodecCost, Line
from tests.support.command import eventually
from tests.support.states import own_state

pytestmark = pytest.mark.usefixtures("world_in_company")


def _ddp(model: nn.Module | None = None) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(model or nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _backward(ddp: DistributedDataParallel) -> list[Tensor]:
    ddp.zero_grad()
    ddp(torch.ones(2, 64)).pow(2).sum().backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def test_alone_dense_leaves_the_gradient_as_it_is() -> None:
    plain, ours = _ddp(), _ddp()
    gradwire.attach(ours, recipe="dense")
    for mine, theirs in zip(_backward(ours), _backward(plain), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_sent_and_what_is_kept_add_up_to_the_gradient() -> None:
    plain, ours = _backward(_ddp()), _ddp()
    wire = gradwire.attach(ours, recipe="topk(ratio=0.1)")
    sent = _backward(ours)
    memory = own_state(wire)["memory"]
    names = [name for name, _ in ours.module.named_parameters()]
    for name, whole, part in zip(names, plain, sent, strict=True):
        assert torch.equal(part + memory.get(name, torch.zeros_like(part)), whole)


def _order_of_memory(kind: str) -> nn.Module:
    """A network of which one large weight is dense, and not in rows."""
    torch.manual_seed(0)
    if kind == "channels last":
        return nn.Sequential(nn.Conv2d(8, 32, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Linear(64, 48))
    model[0].weight = nn.Parameter(torch.randn(64, 48).T)
    return model


@pytest.mark.parametrize(("kind", "shape"), [("channels last", (2, 8, 6, 6)), ("transposed", (2, 64))])
def test_what_is_unsent_belongs_to_its_element_in_any_order_of_memory(
    kind: str, shape: tuple[int, ...]
) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def gradients(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        model(inputs).pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = gradients(_ddp(_order_of_memory(kind)))
    ours = _ddp(_order_of_memory(kind))
    wire = gradwire.attach(ours, recipe="topk(ratio=0.1)", policy=lambda _: None)
    sent = gradients(ours)
    saved = own_state(wire)
    for each, part, (name, _) in zip(whole, sent, ours.module.named_parameters(), strict=True):
        assert torch.equal(part + saved["memory"][name], each)
    rows = _ddp(_order_of_memory(kind).to(memory_format=torch.contiguous_format))
    elsewhere = gradwire.attach(rows, recipe="topk(ratio=0.1)", policy=lambda _: None)
    elsewhere.load_state_dict(saved)
    for model, handle in ((ours, wire), (rows, elsewhere)):
        for p in model.parameters():
            p.grad = None
        handle.flush()
        for each, part, late in zip(whole, sent, [p.grad for p in model.parameters()], strict=True):
            assert late is not None
            assert torch.equal(part + late, each)


def test_the_models_own_group_is_refused() -> None:
    ddp = _ddp()
    with pytest.raises(ValueError, match="process_group is the model's own"):
        gradwire.attach(ddp, process_group=ddp.process_group)


def test_a_group_of_the_users_is_used() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="dense", process_group=dist.new_group([0]))
    _backward(ddp)
    assert wire.report().step == 1


def _group(wire: gradwire.Wire) -> dist.ProcessGroup:
    return wire.attached.backward.reducer.comm.group  # type: ignore[attr-defined, no-any-return]


def test_the_next_model_gets_the_group_of_one_that_has_gone() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    _backward(ddp)
    wire.detach()
    group = _group(wire)
    others: set[dist.ProcessGroup] = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="topq"):
            gradwire.attach(_ddp(), recipe="topq")  # which gives its own back at once
        others.add(_group(gradwire.attach(_ddp(), recipe="dense")))
    assert len(others - {group}) == 1
    del ddp, wire
    assert _group(gradwire.attach(_ddp(), recipe="dense")) is group


def test_a_thread_for_messages_ends_with_the_model() -> None:
    ddp, before = _ddp(), set(threading.enumerate())
    wire = gradwire.attach(ddp, recipe="dense")
    comm: Any = wire.attached.backward.reducer.comm
    comm.world = 2  # alone it would need no thread
    comm.hop(lambda _peers: None).wait()
    begun = set(threading.enumerate()) - before
    [thread] = [each for each in begun if each.name == "gradwire messages"]
    del ddp, wire
    assert not thread.is_alive()


def test_a_group_whose_transport_broke_is_not_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise gradwire.TransportError("torn")

    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    with monkeypatch.context() as patched:
        patched.setattr("gradwire.comm.ProcessGroupComm.all_reduce", broken)
        with pytest.raises(gradwire.TransportError, match="torn"):
            wire.flush()
    group = _group(wire)
    del ddp, wire
    assert _group(gradwire.attach(_ddp(), recipe="dense")) is not group


def test_a_model_that_refers_to_itself_gives_its_group_back_too() -> None:
    ddp = _ddp()
    ddp.itself = [ddp]
    group = _group(gradwire.attach(ddp, recipe="dense"))
    del ddp
    assert _group(gradwire.attach(_ddp(), recipe="dense")) is group


def test_the_python_reducer_is_refused() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        without_buckets = _ddp()
    with pytest.raises(ValueError, match=r"python_reducer.* no buckets .* Set that to True"):
        gradwire.attach(without_buckets, recipe="dense")


def test_buckets_that_ddp_frees_are_refused() -> None:
    ddp = _ddp()
    ddp.lazy_bucket_allocation = True  # an argument of DDP since torch 2.15
    with pytest.raises(ValueError, match=r"lazy_bucket_allocation=True .* leave it out"):
        gradwire.attach(ddp, recipe="dense")


def test_a_parameter_that_thaws_after_attaching_is_an_error_that_says_so() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = _ddp(model)
    model[0].weight.requires_grad_(False)
    gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"\(64, 64\).*frozen when gradwire was attached"):
        _backward(ddp)


@dataclass
class Output:
    """As many libraries return it."""

    logits: Tensor
    loss: Tensor | None = None


class Wrapped(nn.Module):
    """Returns its output inside something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(64, 64), kind

    def forward(self, inputs: Tensor) -> object:
        logits = self.inner(inputs)
        forms = {"dataclass": Output(logits), "dict": {"x": [logits]}, "tuple": (1, logits), "tensor": logits}
        return forms[self.kind]


@pytest.mark.parametrize(
    ("kind", "logits"),
    [
        ("dataclass", lambda outputs: outputs.logits),
        ("dict", lambda outputs: outputs["x"][0]),
        ("tuple", lambda outputs: outputs[1]),
        ("tensor", lambda outputs: outputs),
    ],
)
def test_backward_is_timed_from_the_outputs_gradient_on(kind: str, logits: Callable[[Any], Tensor]) -> None:
    ddp = _ddp(Wrapped(kind))
    wire = gradwire.attach(ddp, recipe="dense")
    loss = logits(ddp(torch.ones(2, 64))).sum()
    pause_s = 0.2
    time.sleep(pause_s)
    loss.backward()
    assert 0 < wire.report().backward_s < pause_s


def test_without_gradients_nothing_happens() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    with torch.no_grad():
        ddp(torch.ones(2, 64))
    assert wire.report().step == 0


def test_an_unknown_kind_of_state_is_refused() -> None:
    wire = gradwire.attach(_ddp(), recipe="dense")
    with pytest.raises(ValueError, match="kind='all' is neither 'rank' nor 'mean'"):
        wire.state_dict(kind="all")  # type: ignore[arg-type]


def test_a_state_stands_under_the_name_of_its_rank_and_the_mean_under_its_own() -> None:
    wire = gradwire.attach(_ddp(), recipe="topk(ratio=0.1)")
    assert wire.state_dict().keys() == {"rank0"}
    mean = wire.mean_state_dict()
    assert mean.keys() == {"mean"}
    with pytest.warns(DeprecationWarning, match=r"call mean_state_dict\(\)"):
        assert wire.state_dict("mean")["mean"]["memory"].keys() == mean["mean"]["memory"].keys()
    wire.load_state_dict(mean)


def test_settled_says_whether_an_adaptive_recipe_has_decided() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="covap")
    assert not wire.settled
    assert "measuring" in str(wire.report())
    for _ in range(5):
        _backward(ddp)
    assert wire.settled
    facts = wire.report().facts
    assert facts is not None
    assert len(facts["collectives_s"]) > 0
    assert sum(facts["collectives_s"]) == facts["allreduce_s"]


def test_memory_in_bfloat16_takes_less_space_and_keeps_what_it_can_say() -> None:
    plain, ours = _backward(_ddp()), _ddp()
    wire = gradwire.attach(ours, recipe="topk(ratio=0.1)", memory_dtype=torch.bfloat16)
    full = gradwire.attach(_ddp(), recipe="topk(ratio=0.1)").report().memory_bytes
    assert wire.report().memory_bytes == full * (4 + 2) // (4 + 4)
    sent = _backward(ours)
    memory = own_state(wire)["memory"]
    names = [name for name, _ in ours.module.named_parameters()]
    for name, whole, part in zip(names, plain, sent, strict=True):
        kept = memory.get(name, torch.zeros_like(part))
        # One rounding to 8 bits of precision: half an ulp.
        assert ((part + kept - whole).abs() <= whole.abs() * torch.finfo(torch.bfloat16).eps / 2).all()
        assert torch.equal(kept, kept.bfloat16().float())


@pytest.mark.parametrize("recipe", ["topk", "auto(target=0.9)"])
def test_a_target_that_the_recipe_would_ignore_is_refused(recipe: str) -> None:
    with pytest.raises(ValueError, match=r"target=0.8 is for the recipe auto; .* would ignore it"):
        gradwire.attach(_ddp(), recipe=recipe, target=0.8)


@pytest.mark.parametrize(("recipe", "target"), [("auto", 0.8), ("auto(target=0.8)", 0.8), ("topk", 0.95)])
def test_a_target_that_means_something_is_accepted(recipe: str, target: float) -> None:
    gradwire.attach(_ddp(), recipe=recipe, target=target).detach()


def test_memory_in_any_other_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory_dtype=torch.float16; choose torch.bfloat16"):
        gradwire.attach(_ddp(), recipe="topk", memory_dtype=torch.float16)


@pytest.mark.parametrize(
    ("make", "accepted"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), True),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), False),
        (lambda parameters: torch.optim.Adam(parameters), False),
    ],
)
def test_momentum_is_applied_once(make: Callable[[Any], torch.optim.Optimizer], accepted: bool) -> None:
    ddp = _ddp()
    optimizer = make(ddp.parameters())
    if accepted:
        gradwire.attach(ddp, optimizer, recipe="dgc(ratio=0.1)")
        return
    with pytest.raises(ValueError, match=r"dgc.* applies momentum itself.*SGD\(momentum=0\)"):
        gradwire.attach(ddp, optimizer, recipe="dgc(ratio=0.1)")
    gradwire.attach(ddp, optimizer, recipe="dgc(ratio=0.1, momentum=0.0)")


def test_a_model_that_dies_leaves_no_flat_buffers_behind_in_its_optimizer() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = gradwire.attach(_ddp(model), optimizer, recipe="topk(ratio=0.1)")
    flat_buffers = weakref.ref(wire.attached.backward.reducer.layout.flat_buffers[0])
    del wire
    gc.collect()
    assert flat_buffers() is None
    assert not optimizer._optimizer_step_post_hooks


def _wrapped(module: nn.Module, given: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(module)
    return model, gradwire.attach(model, recipe="topk(ratio=0.1)", **given(model))


def _plain(model: nn.Module, given: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    over = dist.group.WORLD
    return model, gradwire.attach(model, recipe="topk(ratio=0.1)", replicas=over, **given(model))


def _local_steps(model: nn.Module, given: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    optimizer, over = torch.optim.SGD(model.parameters(), lr=0.1), dist.group.WORLD
    return model, gradwire.outer(model, optimizer, replicas=over, every=1, **given(model))


class _Alone:
    """`Members` of a single replica."""

    name = id = "site-a"
    address = "127.0.0.1"
    alone_s = None

    def ask(self, card: Card) -> Roster:
        return Roster(1, (Entry(self.name, self.id, card),))

    def close(self) -> None:
        """Nothing is held."""


def _moving(model: nn.Module, given: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"members": _Alone()} | given(model)
    return model, gradwire.outer(model, optimizer, every=1, **options)


def _fully_sharded(model: nn.Module, given: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, gradwire.attach(model, recipe="int8", **given(model))


_Carried = Callable[[nn.Module, Callable[[nn.Module], Any]], tuple[nn.Module, Any]]


def _nothing(_model: nn.Module) -> dict[str, Any]:
    return {}


def _by(model: nn.Module) -> dict[str, Any]:
    return {"policy": lambda spec: "int8" if spec.numel > 64 and model.training else "dense"}


class _TrainersScaler(torch.amp.GradScaler):
    """Refers to a model, as a scaler of a trainer may."""

    model: nn.Module


def _scaler_of(model: nn.Module) -> dict[str, Any]:
    scaler = _TrainersScaler("cpu", init_scale=2.0)
    scaler.model = model
    return {"scaler": scaler}


class _Trainer:
    """Refers to its model, and takes its metrics."""

    def __init__(self, model: nn.Module, told: list[int]) -> None:
        self.model, self._told = model, told

    def log(self, _metrics: dict[str, float], step: int) -> None:
        self._told.append(step)


class _ModelsLogger(logging.Logger):
    """Refers to a model."""

    def __init__(self, model: nn.Module, told: list[int]) -> None:
        super().__init__("of a model", logging.INFO)
        self.model, self._told = model, told

    def info(self, _text: object, *arguments: object, **_: object) -> None:
        self._told.append(int(str(arguments[0])))


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("carried", "given"),
    [
        *product((_wrapped, _plain, _local_steps, _moving), (_by,)),
        *product((_wrapped, _plain, _fully_sharded), (_scaler_of,)),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_goes_although_what_it_was_attached_with_refers_to_it(
    carried: _Carried, given: Callable[[nn.Module], Any], steps: int
) -> None:
    model, wire = carried(nn.Sequential(nn.Linear(64, 64)), given)
    _train(model, steps)
    gone = weakref.ref(model)
    del model, wire
    gc.collect()
    assert gone() is None


class _Finding(_Alone):
    """Refers to something, and may find nobody once it has begun."""

    def __init__(self, refers_to: object, alone_s: float | None, left: list[str]) -> None:
        self.refers_to, self.alone_s, self._left, self._has_begun = refers_to, alone_s, left, False

    def ask(self, card: Card) -> Roster:
        if self._has_begun and self.alone_s is not None:
            raise TransportError("the others are away")
        self._has_begun = True
        return super().ask(card)

    def close(self) -> None:
        self._left.append(self.name)


@pytest.mark.parametrize("refers", [True, False])
@pytest.mark.parametrize("alone_s", [None, 0.0])
def test_a_model_goes_although_its_members_refer_to_it_and_they_are_left(
    refers: bool, alone_s: float | None
) -> None:
    left: list[str] = []
    model, _wire = _moving(
        nn.Sequential(nn.Linear(64, 64)),
        lambda of: {"members": _Finding(of if refers else None, alone_s, left)},
    )
    _train(model)
    gone = weakref.ref(model)
    assert not left
    del model, _wire
    # One of its threads may ask just now.
    assert eventually(lambda: gc.collect() >= 0 and gone() is None, 30.0)
    assert left == ["site-a"]


@pytest.mark.parametrize("carried", [_wrapped, _plain, _local_steps, _moving, _fully_sharded])
@pytest.mark.parametrize("target", [lambda *of: _Trainer(*of).log, _ModelsLogger])
def test_a_model_goes_although_a_target_of_its_metrics_refers_to_it_and_is_told_until_then(
    carried: _Carried, target: Callable[[nn.Module, list[int]], Any]
) -> None:
    model, wire = carried(nn.Sequential(nn.Linear(64, 64)), _nothing)
    told: list[int] = []
    wire.log_to(target(model, told), every=1)
    gone = weakref.ref(model)
    del wire
    gc.collect()
    _train(model)
    # Alone, FSDP2 has no traffic that anything could be told of.
    assert len(told) == (0 if carried is _fully_sharded else 2), "nothing but the model is there"
    del model
    gc.collect()
    assert gone() is None


def test_a_policy_is_asked_when_attaching_and_its_answers_stay() -> None:
    answers = {"0.weight": "fp16"}
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)", policy=lambda spec: answers.get(spec.name))
    answers.clear()
    wire.switch("topk(ratio=0.2)")
    assert "0.weight" not in own_state(wire)["memory"]
    assert "1.weight" in own_state(wire)["memory"]


def test_a_warning_made_an_error_refuses_before_anything_is_attached() -> None:
    ddp = _ddp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GradwireWarning, match="sent without loss"):
            gradwire.attach(ddp, recipe="gcomp")
    gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), recipe="gcomp")


def test_what_a_policy_of_the_users_raises_is_raised() -> None:
    def policy(spec: Any) -> str:
        raise KeyError(spec.name)

    with pytest.raises(KeyError, match=r"weight|bias"):
        gradwire.attach(_ddp(), recipe="dense", policy=policy)


@pytest.mark.parametrize("text", ["flexible", "mergecomp(split='timed')"])
def test_what_changes_while_it_runs_is_refused_where_nobody_would_watch_it(text: str) -> None:
    with pytest.raises(ValueError, match="changes while it runs"):
        gradwire.attach(_ddp(), recipe="dense", policy={"*": text})
    with pytest.raises(ValueError, match="changes while it runs"):
        gradwire.attach(_ddp(), recipe=f"mergecomp(inner={text!r})")


@pytest.mark.parametrize(("text", "decided"), [("flexible", True), ("mergecomp(split='timed')", False)])
def test_a_contest_is_not_decided_but_what_never_ends_is(text: str, decided: bool) -> None:
    assert gradwire.attach(_ddp(), recipe=text).settled == decided


def test_a_flush_hands_over_what_is_unsent_and_keeps_momentum() -> None:
    ddp = _ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = gradwire.attach(ddp, optimizer, recipe="dgc(ratio=0.1, warmup_steps=0)", policy=lambda _: None)
    for _ in range(2):
        _backward(ddp)
    before = own_state(wire)
    wire.flush()
    after = own_state(wire)
    assert any(plane.any() for plane in before["planes"]["momentum"].values())
    for name, plane in before["planes"]["momentum"].items():
        assert torch.equal(after["planes"]["momentum"][name], plane)
    assert not any(plane.any() for plane in after["memory"].values())
    with pytest.warns(GradwireWarning, match="momentum is no longer applied"):
        wire.detach()


def test_scalecom_finds_its_rates_in_the_first_forward_pass() -> None:
    ours = _ddp()
    wire = gradwire.attach(ours, recipe="scalecom(rates='auto')")
    with torch.no_grad():
        ours(torch.ones(4096, 64))  # an evaluation tells nothing
    for _ in range(6):
        ours.zero_grad()
        ours(torch.ones(32 * 150, 64)).pow(2).sum().backward()
    assert "rates={'1.*': 50, '0.*': 50}" in wire.report().recipe


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """What `attach`, and each change of a plan, has prepared, in order."""
    asked: list[frozenset[str]] = []
    monkeypatch.setattr(compiler, "prepare", lambda names, turn: asked.append(names))
    return asked


def test_kernels_of_a_fixed_recipe_are_prepared_at_attach(prepared: list[frozenset[str]]) -> None:
    gradwire.attach(_ddp(), recipe="int8")
    assert ["blocks" in names for names in prepared] == [True]


def test_kernels_of_an_adaptive_one_are_prepared_as_early_as_it_knows_them(
    prepared: list[frozenset[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[bool] = []

    def timed(_exchange: object, _text: str, _device: object) -> CodecCost:
        before.append("blocks" in prepared[-1])
        return CodecCost(Line(1e-6, 1e-9), Line(1e-6, 1e-9))

    monkeypatch.setattr("gradwire.control.warmup.codec_cost", timed)
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="mergecomp(inner='int8')")
    assert "blocks" in prepared[0], "of the codec that it will time"
    while not wire.settled:
        _backward(ddp)
    assert before == [True]


@pytest.mark.rest
def test_compiling_is_logged_and_stands_in_the_report_where_a_step_waited_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiles(_names: object, turn: int) -> None:
        numba.njit(lambda x: x + 1)(1)

    monkeypatch.setattr(compiler, "prepare", compiles)
    caplog.set_level(logging.INFO, "gradwire")
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="int8")
    _backward(ddp)
    assert "compiling kernels for int8" in caplog.text
    assert wire.report().compile_s == 0.0
    adaptive = gradwire.attach(ddp := _ddp(), recipe="mergecomp(inner='int8')")
    while not adaptive.settled:
        _backward(ddp)
    assert 0.0 < adaptive.report().compile_s < compiler.compiled_s()


@pytest.mark.parametrize("recipe", ["int8", "mergecomp(inner='int8')"])
def test_kernels_that_cannot_be_prepared_stop_no_rank(
    recipe: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_names: object, turn: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(compiler, "prepare", fails)
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe=recipe)
    _backward(ddp)
    while not wire.settled:
        _backward(ddp)
    assert _backward(ddp)
    assert "no space left" in caplog.text


def test_parameters_whose_all_reduce_ddp_delays_are_left_to_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    late = [(name, each) for name, each in model.named_parameters() if name.startswith("1.")]
    hooked = model[0].weight
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=hooked, bucket_cap_mb=1
    )
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    for _ in range(2):
        assert len(_backward(ddp)) == 4
    assert wire.report().step == 2
    assert set(own_state(wire)["memory"]) == {"0.weight"}


def test_a_model_that_ddp_has_nothing_to_hand_over_of_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=trained, param_to_hook_all_reduce=model[0].weight
    )
    with pytest.raises(ValueError, match="DDP ignores every trainable parameter"):
        gradwire.attach(ddp, recipe="dense")


@pytest.mark.filterwarnings("ignore:.torch.jit")  # what torch itself loads with its function
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_optimizer_inside_backward_is_refused_before_a_pass(wrapped: bool) -> None:
    optim = import_module("torch.distributed.optim")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optim._apply_optimizer_in_backward(torch.optim.SGD, model[1].parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'1.bias' has an optimizer that steps inside backward\(\)"):
        gradwire.attach(DistributedDataParallel(model) if wrapped else model, recipe="dense")


CALLS: dict[str, Callable[[gradwire.Wire, Any], object]] = {
    "flush": lambda wire, _: wire.flush(),
    "detach": lambda wire, _: wire.detach(),
    "switch": lambda wire, _: wire.switch("int8"),
    "save": lambda wire, folder: wire.save(folder),
    "load": lambda wire, folder: wire.load(folder),
    "mean_state_dict": lambda wire, _: wire.mean_state_dict(),
    "load_state_dict": lambda wire, _: wire.load_state_dict({}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_call_for_all_ranks_inside_a_backward_pass_is_refused(
    call: str, wrapped: bool, tmp_path: Any
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    attached = DistributedDataParallel(model) if wrapped else model
    wire = gradwire.attach(attached, recipe="topk(ratio=0.1)")
    said: list[str] = []

    def hook(_gradient: Tensor) -> None:
        with pytest.raises(gradwire.errors.GradwireError) as caught:
            CALLS[call](wire, tmp_path)
        said.append(str(caught.value))

    for place in (model[1].weight, model[0].weight):  # before the first gradient is there, and after it
        place.register_hook(hook)
    attached(torch.ones(2, 64)).pow(2).sum().backward()
    assert len(said) == 2
    assert all(each.startswith(f"{call}(") and "was called inside a backward pass" in each for each in said)
    assert wire.report().step == 1, "the pass itself goes on"
    wire.flush()


@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "powersgd(rank=2)"])
@pytest.mark.parametrize(("before", "after"), [((0, 1), (1, 2)), ((1,), (0, 1)), ((0, 1), (1,))])
def test_what_fits_goes_along_when_parameters_are_frozen_or_thawed(
    before: tuple[int, ...], after: tuple[int, ...], recipe: str
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def wrapped(trained: tuple[int, ...]) -> DistributedDataParallel:
        for number, layer in enumerate(model):
            layer.requires_grad_(number in trained)
        return DistributedDataParallel(model)

    ddp = wrapped(before)
    wire = gradwire.attach(ddp, recipe=recipe)
    _backward(ddp)
    saved, old = wire.state_dict(), own_state(wire)["memory"]
    wire = gradwire.attach(wrapped(after), recipe=recipe)
    gone, fresh = set(before) - set(after), set(after) - set(before)
    with pytest.raises(ValueError, match="other parameter names") as refused:
        wire.load_state_dict(saved)
    assert all(f"it has {each}.weight, which this model has not" in str(refused.value) for each in gone)
    assert all(f"this model has {each}.weight, which it has not" in str(refused.value) for each in fresh)
    assert "missing='drop'" in str(refused.value)
    with pytest.warns(GradwireWarning, match="parameters have changed since the state was saved") as warned:
        wire.load_state_dict(saved, missing="drop")
    assert all(f"{each}.weight" in str(warned[0].message) for each in gone | fresh)
    for name, memory in own_state(wire)["memory"].items():
        assert torch.equal(memory, old.get(name, torch.zeros(64, 64)))
    assert wire.report().step == 1
    _backward(wire.attached.model)
    assert wire.report().step == 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch's, of the cycle
def test_a_pass_that_makes_a_graph_of_gradients_ends_as_under_ddp() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor(3.0))

        def forward(self) -> Tensor:
            return self.p.pow(2)

    plain, ours = DistributedDataParallel(Square()), DistributedDataParallel(Square())
    wire = gradwire.attach(ours, recipe="dense")
    for _ in range(3):
        for ddp in (plain, ours):
            ddp().backward(create_graph=True)
        mine, theirs = ours.module.p.grad, plain.module.p.grad
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
    assert wire.report().step == 3
