"""Parameters that change after gradwire was attached are named; what only looks like a change is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import gradwire
from gradwire.sources.same_parameters import Known

pytestmark = pytest.mark.usefixtures("world_of_one")


class Tied(nn.Module):
    """Two layers, a third with the weight of the first, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.tied.weight = self.first.weight
        self.more = nn.Sequential()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tied(self.second(self.first(inputs)))
        found: Tensor = self.more(self.frozen(hidden))
        return found


def _step(model: nn.Module, inner: Tied) -> None:
    model(torch.ones(2, 4, dtype=inner.first.weight.dtype)).sum().backward()


def assigned(model: Tied) -> None:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)


def replaced(model: Tied) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())


def frozen_copy(model: Tied) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().clone(), requires_grad=False)


def untied(model: Tied) -> None:
    model.tied.weight = nn.Parameter(model.first.weight.detach().clone())


def tied(model: Tied) -> None:
    model.second.weight = model.first.weight


def appended(model: Tied) -> None:
    model.more.append(nn.Linear(4, 4))


def removed(model: Tied) -> None:
    model.second = nn.Linear(4, 4).requires_grad_(False)
    model.second.bias = None


def thawed(model: Tied) -> None:
    model.frozen.weight.requires_grad_(True)


def cast(model: Tied) -> None:
    model.double()


def overwritten_by_a_cast(model: Tied) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def transposed(model: Tied) -> None:
    model.second.weight.data = model.second.weight.data.T.contiguous().T


def resized(model: Tied) -> None:
    model.second.bias.data = torch.zeros(1)


CHANGES: dict[Callable[[Tied], None], str] = {
    assigned: r"'second\.bias' was replaced.*; and 3 more",
    replaced: r"'second\.weight' was replaced\. ",
    frozen_copy: r"'second\.weight' was replaced\. ",
    untied: r"'tied\.weight' was added\. ",
    tied: r"'second\.weight' was removed\. ",
    appended: r"'more\.0\.weight' was added; 'more\.0\.bias' was added\. ",
    removed: r"'second\.bias' was removed; 'second\.weight' was replaced\. ",
    thawed: r"'frozen\.weight' \(4, 4\) was frozen when gradwire was attached\. ",
    cast: r"'second\.bias' is float64 \(4,\) on cpu, and was float32 \(4,\) on cpu; ",
    overwritten_by_a_cast: r"'second\.weight' was replaced",
    resized: r"'second\.bias' is float32 \(1,\) on cpu, and was float32 \(4,\) on cpu\. ",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_change_is_refused_by_name_before_anything_is_sent(
    change: Callable[[Tied], None], wrapped: bool
) -> None:
    inner = Tied()
    model = DistributedDataParallel(inner) if wrapped else inner
    replicas = None if wrapped else dist.group.WORLD
    wire = gradwire.attach(model, recipe="dense", replicas=replicas)
    _step(model, inner)
    change(inner)
    for _ in range(2):
        with pytest.raises(ValueError, match=CHANGES[change]) as found:
            _step(model, inner)
        assert "load_state_dict without assign=True" in str(found.value)
    assert wire.report().step == 1
    with torch.no_grad():
        inner.double()
        model(torch.ones(2, 4).double())  # to evaluate is nobody's concern


def compiled_layer(model: Tied) -> None:
    model.second.compile(backend="eager")
    model.more = nn.Sequential(nn.Identity())


def wrapped_layer(model: Tied) -> None:
    model.second = nn.Sequential(model.second)  # type: ignore[assignment]  # as wrappers do: names change


def parametrized(model: Tied) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(model.second, "weight", Half())


def pruned(model: Tied) -> None:
    prune.l1_unstructured(model.second, "weight", 0.5)


def loaded(model: Tied) -> None:
    model.load_state_dict({name: each + 1 for name, each in model.state_dict().items()})


def cast_and_back(model: Tied) -> None:
    model.double().float()


def frozen_replaced(model: Tied) -> None:
    model.frozen = nn.Linear(4, 4).requires_grad_(False)


def frozen_now(model: Tied) -> None:
    model.second.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [compiled_layer, wrapped_layer, parametrized, pruned, loaded, cast_and_back, frozen_replaced, frozen_now],
)
def test_what_keeps_the_parameters_passes(change: Callable[[Tied], None]) -> None:
    model = Tied()
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    change(model)
    _step(model, model)
    assert wire.report().step == 1


@pytest.mark.parametrize(
    "change", [*CHANGES, compiled_layer, wrapped_layer, parametrized, pruned, frozen_replaced, frozen_now]
)
def test_a_glance_sees_every_change_and_nothing_else(change: Callable[[Tied], None]) -> None:
    model = Tied()
    parameters = dict(model.named_parameters())
    known = Known(parameters, [name for name, each in parameters.items() if each.requires_grad], ())
    assert not known.seen_in(model), "never looked at"
    known.see(model)
    loaded(model)
    assert known.seen_in(model)
    change(model)
    assert not known.seen_in(model)
    known.see(model)
    assert known.seen_in(model)


def test_what_stands_in_for_parameters_is_not_remembered() -> None:
    class Seeing(Tied):
        def forward(self, inputs: Tensor) -> Tensor:
            known.see(self)
            return super().forward(inputs)

    model = Seeing()
    known = Known(dict(model.named_parameters()), (), ())
    fast = {name: each * 2 for name, each in model.named_parameters()}
    functional_call(model, fast, torch.ones(2, 4))
    assert not known.seen_in(model)


def test_buckets_of_ddp_keep_the_order_of_memory_and_own_ones_do_not_need_it() -> None:
    for wrapped in (False, True):
        inner = Tied()
        model = DistributedDataParallel(inner) if wrapped else inner
        wire = gradwire.attach(model, recipe="dense", replicas=None if wrapped else dist.group.WORLD)
        _step(model, inner)
        model.zero_grad()
        transposed(inner)
        if wrapped:
            with pytest.raises(
                ValueError, match=r"'second\.weight' has strides \(1, 4\), and had \(4, 1\)\. "
            ):
                _step(model, inner)
        else:
            _step(model, inner)
        assert wire.report().step == 2 - wrapped


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # torch's own, which counts all dimensions
def test_strides_of_dimensions_of_size_1_do_not_count() -> None:
    inner = nn.Conv2d(4, 4, 1)
    ddp = DistributedDataParallel(inner)
    wire = gradwire.attach(ddp, recipe="dense")
    before = inner.weight.stride()
    inner.to(memory_format=torch.channels_last)
    assert inner.weight.stride() != before
    ddp(torch.ones(1, 4, 2, 2)).sum().backward()
    assert wire.report().step == 1


def test_weight_norm_adds_parameters() -> None:
    model = Tied()
    gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    parametrizations.weight_norm(model.second)
    with pytest.raises(
        ValueError, match=r"'second\.weight' was removed; 'second\.parametrizations\.weight\."
    ):
        _step(model, model)


def test_tensors_that_stand_in_for_parameters_pass_their_gradients_on() -> None:
    model = Tied()
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    fast = {name: each * 2 for name, each in model.named_parameters()}
    functional_call(model, fast, torch.ones(2, 4)).sum().backward()
    assert wire.report().step == 1
    assert model.first.weight.grad is not None


def test_what_ddp_ignores_is_the_users() -> None:
    inner = Tied()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["second.weight"])  # type: ignore[no-untyped-call]
    ddp = DistributedDataParallel(inner)
    wire = gradwire.attach(ddp, recipe="dense")
    _step(ddp, inner)
    replaced(inner)
    _step(ddp, inner)
    assert wire.report().step == 2


def test_a_forward_pass_round_the_plain_module_is_checked_in_its_backward_pass() -> None:
    model = Tied()
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    model.first(torch.ones(2, 4)).sum().backward()
    assert wire.report().step == 1
    appended(model)
    with pytest.raises(ValueError, match=r"'more\.0\.weight' was added"):
        model.first(torch.ones(2, 4)).sum().backward()
    assert wire.report().step == 1
