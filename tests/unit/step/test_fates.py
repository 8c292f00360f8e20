"""What optimizers have used, as their hooks tell it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from gradwire.errors import GradwireError
from gradwire.placement import HostDevice
from gradwire.step.optimizer_log import OptimizerLog
from gradwire.unit.context import Fates


def test_gradients_that_a_hook_of_the_user_s_clears_before_the_step_are_dropped() -> None:
    model, is_bad = nn.Linear(3, 2), [False]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad() if is_bad[0] else None)
    steps = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice())
    steps.watch(model)

    def fates_of_a_step() -> Fates | None:
        steps.exchange_begins(None, compresses=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.exchange_ended()
        optimizer.step()
        return steps.fates()

    assert fates_of_a_step() is None
    is_bad[0] = True
    assert fates_of_a_step() == Fates(dropped=frozenset({"weight", "bias"}), made=False)


def test_only_the_step_that_the_user_drops_is_left_out() -> None:
    model = nn.Linear(3, 2)
    steps = OptimizerLog(dict(model.named_parameters()), (), HostDevice())

    def fates_of_a_step(*, drops: bool) -> Fates | None:
        steps.exchange_begins(None, compresses=True)
        steps.exchange_ended()
        if drops:
            steps.drop()
        return steps.fates()

    assert fates_of_a_step(drops=False) is None
    assert fates_of_a_step(drops=True) == Fates(dropped=frozenset({"weight", "bias"}), made=False)
    assert fates_of_a_step(drops=False) is None


def test_a_step_that_a_scaler_lets_a_fused_optimizer_skip_is_not_made() -> None:
    """On the device: `GradScaler` hands such an optimizer `found_inf`, and calls its `step` all the same."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    steps = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice())
    steps.watch(model)

    def fates_of_a_step(found_inf: float) -> Fates | None:
        steps.exchange_begins(None, compresses=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.exchange_ended()
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        return steps.fates()

    before = model.weight.detach().clone()
    assert fates_of_a_step(0.0) is None
    assert not torch.equal(model.weight, before)
    before = model.weight.detach().clone()
    assert fates_of_a_step(1.0) == Fates(open=frozenset({"weight", "bias"}), made=False)
    assert torch.equal(model.weight, before)


def test_an_optimizer_that_is_gone_still_says_which_parameters_were_its_own() -> None:
    model = nn.Linear(3, 2)
    steps = OptimizerLog(
        dict(model.named_parameters()), (torch.optim.SGD(model.parameters(), lr=0.1),), HostDevice()
    )
    steps.watch(model)
    gc.collect()
    assert not steps.optimizers
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin() -> None:
        steps.exchange_begins(None, compresses=False)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.exchange_ended()

    begin()
    other.step()
    steps.fates()
    begin()
    other.zero_grad()
    steps.note_cleared()
    assert steps.fates() == Fates(dropped=frozenset({"weight", "bias"}), made=False)


def test_parameters_that_an_optimizer_is_given_later_are_its_own() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    steps = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice())
    steps.watch(model)

    def exchange() -> None:
        steps.exchange_begins(None, compresses=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.exchange_ended()

    exchange()
    optimizer.step()
    optimizer.add_param_group({"params": [model.bias]})
    exchange()
    optimizer.zero_grad()
    assert steps.fates() == Fates(dropped=frozenset({"weight", "bias"}), made=False)


def test_an_optimizer_that_shares_parameters_with_one_that_steps_may_be_the_one_that_steps() -> None:
    model = nn.Linear(3, 2)
    part, whole = (torch.optim.SGD(each, lr=0.1) for each in ([model.weight], model.parameters()))
    steps = OptimizerLog(dict(model.named_parameters()), (part, whole), HostDevice())
    steps.watch(model)

    def fates_of_a_step(end: Callable[[], object]) -> Fates | None:
        steps.exchange_begins(None, compresses=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.exchange_ended()
        end()
        return steps.fates()

    assert fates_of_a_step(whole.zero_grad) is None, "none has stepped yet, so another may use the gradients"
    assert fates_of_a_step(part.step) == Fates(open=frozenset({"bias"}), made=True)
    assert fates_of_a_step(whole.zero_grad) == Fates(dropped=frozenset({"weight", "bias"}), made=False)


def test_zeros_that_an_exchange_has_brought_are_not_cleared_whichever_optimizer_steps() -> None:
    model = nn.Linear(3, 2)
    given, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    steps = OptimizerLog(dict(model.named_parameters()), (given,), HostDevice())
    steps.watch(model)
    other.param_groups = given.param_groups  # as of the one inside a sharpness-aware optimizer
    for value in (1.0, 0.0, 1.0, 0.0):
        steps.exchange_begins(None, compresses=True)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        steps.exchange_ended()
        other.step()
        other.zero_grad()
        steps.note_cleared()
        assert steps.fates() is None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps.exchange_begins(None, compresses=True)
    steps.exchange_ended()
    other.zero_grad(set_to_none=False)
    other.step()
    fates = steps.fates()
    assert fates is not None
    assert fates.dropped == {"weight", "bias"}


def _cleared(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _zeroed(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def _kept(_optimizer: torch.optim.Optimizer) -> None: ...


@pytest.mark.parametrize("after", [_kept, _cleared, _zeroed])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_step_without_an_exchange_is_seen_although_a_hook_of_the_user_s_clears_gradients_after_it(
    after: Callable[[torch.optim.Optimizer], None], is_early: bool
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice(), raises=True)
    register = partial(optimizer.register_step_post_hook, lambda *_: after(optimizer))
    if is_early:
        register()
    watched.watch(model)
    if not is_early:
        register()

    def bring() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    for _ in range(2):
        watched.exchange_begins(None, compresses=True)
        bring()
        watched.exchange_ended()
        optimizer.step()
    optimizer.step()  # with no gradients, or those that it has used
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    watched.backward_begins(exchanges=False)  # as under no_sync()
    bring()
    optimizer.step()
    watched.exchange_begins(None, compresses=True)
    bring()
    watched.exchange_ended()
    optimizer.step()
    bring()
    with pytest.raises(GradwireError, match="never exchanged"):
        optimizer.step()


def test_gradients_that_a_closure_replaces_by_exchanged_ones_are_no_step_without_an_exchange() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice(), raises=True)
    steps.watch(model)

    def closure() -> float:
        optimizer.zero_grad()
        steps.exchange_begins(steps.fates(), compresses=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.exchange_ended()
        return 0.0

    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step(closure)


def test_a_hook_of_the_user_s_that_asks_inside_a_step_takes_back_no_exchange_before_it() -> None:
    model, asked = nn.Linear(3, 2), list[Fates | None]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice())
    steps.watch(model)
    optimizer.register_step_post_hook(lambda *_: asked.append(steps.fates()))
    for _step in range(2):
        for _exchange in range(2):
            fates = steps.fates()
            if fates is not None:
                steps.rolled_back(fates, is_dropped=False)
            steps.exchange_begins(fates, compresses=False)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            steps.exchange_ended()
        optimizer.step()
    assert asked == [None, Fates(made=True)]
