"""What optimizers have used, as their hooks tell it."""

from __future__ import annotations

import gc

import torch
from torch import nn

from gradwire.placement import HostDevice
from gradwire.step.context import Fates
from gradwire.step.fates import Steps


def test_gradients_that_a_hook_of_the_user_s_clears_before_the_step_are_dropped() -> None:
    model, is_bad = nn.Linear(3, 2), [False]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad() if is_bad[0] else None)
    steps = Steps(dict(model.named_parameters()), (optimizer,), HostDevice())
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


def test_an_optimizer_that_is_gone_still_says_which_parameters_were_its_own() -> None:
    model = nn.Linear(3, 2)
    steps = Steps(
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
