"""Which parameters the metric knows, what it makes of a unit's parts, and what it refuses."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.errors import GradwireWarning
from gradwire.metric import numerator_of, numerators, thresholds
from gradwire.unit.context import ExchangeContext, Part, Replicated
from tests.support.looped import looped
from tests.support.optimizers import CASES, N, context_of, draw, trained

SGD = {
    "lr": 0.5,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


def seen(parameter: torch.Tensor, group: dict[str, Any] = SGD, **state: Any) -> Replicated:
    return Replicated(parameter, group, state, torch.optim.SGD)


def test_parts_of_parameters_are_looked_up_by_name_and_place() -> None:
    known = {"a": seen(torch.arange(1.0, 13.0).view(3, 4)), "c": seen(torch.full((2,), 100.0))}
    parts = (Part("a", (3, 4), 2, 5), Part("b", (3,), 0, 3), Part("c", (2,), 1, 2))
    ctx = ExchangeContext(0, 0, 0, 1, parts=parts, replicas=known.get)
    found = numerators(7, ctx)
    assert torch.allclose(found, torch.tensor([6.0, 8.0, 10.0, 0.0, 0.0, 0.0, 200.0]), rtol=1e-6)
    assert (found <= torch.tensor([6.0, 8.0, 10.0, 0.0, 0.0, 0.0, 200.0])).all()
    assert thresholds(7, ctx).tolist() == [129, 130, 130, 0, 0, 0, 134]


def test_without_an_optimizer_nothing_may_be_lost() -> None:
    assert not thresholds(5, ExchangeContext(0, 0, 0, 1)).any()


def test_elements_come_in_the_order_of_memory_as_in_a_bucket() -> None:
    plain = torch.arange(1.0, 49.0).view(2, 3, 2, 4)
    last = plain.to(memory_format=torch.channels_last)
    group = {**SGD, "momentum": 0.9}
    buffer = (-plain).to(memory_format=torch.channels_last)
    ctx = ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(last, group, momentum_buffer=buffer))
    memory = last.as_strided((48,), (1,))
    assert torch.allclose(numerators(48, ctx), memory * 2 + 0.9 * memory, rtol=1e-6)
    state = replace(seen(last, group), state={"momentum_buffer": -plain})
    with pytest.warns(GradwireWarning, match="laid out"):
        assert not thresholds(48, ExchangeContext(0, 0, 0, 1, replicas=lambda _: state)).any()


def test_parameters_with_gaps_come_row_by_row() -> None:
    gappy = torch.arange(1.0, 25.0).view(4, 6)[:, ::2]
    found = numerators(12, ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(gappy)))
    assert torch.allclose(found, 2 * gappy.reshape(-1), rtol=1e-6)


def test_parameters_of_sixteen_bits_count_as_they_are() -> None:
    parameter = draw(3).bfloat16()
    found = thresholds(N, ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(parameter)), torch.bfloat16)
    expected = thresholds(N, ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(parameter.float())))
    assert torch.equal(found, expected - 5)  # a thirty-second of a unit


def test_float16_has_exponents_of_its_own() -> None:
    values = torch.tensor([1.0, 2.0**-13, 2.0**-14, 0.0, 60000.0], dtype=torch.float16)
    group = {**SGD, "lr": 2.0**-5}  # C is 32 times the parameter, and counts as a quarter of that
    found = thresholds(5, ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(values, group)), torch.float16)
    assert found.tolist() == [18, 5, 4, 0, 33]
    found = thresholds(5, ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(values)), torch.float16)
    assert found.tolist() == [14, 1, 0, 0, 29]


def test_a_loss_scale_in_the_gradients_is_one_in_what_they_are_compared_with() -> None:
    group = {**SGD, "momentum": 0.9, "weight_decay": 0.1}
    known = seen(draw(3), group, momentum_buffer=draw(4))
    plain = ExchangeContext(0, 0, 0, 1, replicas=lambda _: known)
    scaled = replace(plain, scale=2.0**12)
    assert torch.equal(numerators(N, scaled), 2.0**12 * numerators(N, plain))
    assert torch.equal(thresholds(N, scaled), thresholds(N, plain) + 12)


@looped("case", CASES)
def test_every_case_has_a_formula_before_and_after_its_first_step(case: Any) -> None:
    for steps in (0, 1, 2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert thresholds(N, context_of(*trained(case, steps))).any() or steps == 0
        assert not said


class Mine(torch.optim.SGD):
    """Might do anything."""


@looped(
    ("kind", "options", "named"),
    [
        (torch.optim.Adam, {"amsgrad": True}, r"Adam\(amsgrad=True\)"),
        (torch.optim.AdamW, {"maximize": True}, r"AdamW\(maximize=True\)"),
        (torch.optim.SGD, {"lr": 0.1, "maximize": True}, r"SGD\(maximize=True\)"),
        (torch.optim.SGD, {"lr": 0.1, "differentiable": True}, r"SGD\(differentiable=True\)"),
        (torch.optim.RMSprop, {"centered": True}, r"RMSprop\(centered=True\)"),
        (torch.optim.RMSprop, {"momentum": 0.5}, r"RMSprop\(momentum=0.5\)"),
        (torch.optim.NAdam, {}, r"torch\.optim\.nadam\.NAdam"),
        (Mine, {"lr": 0.1}, r"test_unit\.Mine"),
    ],
)
def test_what_has_no_formula_is_said_and_nothing_may_be_lost(
    kind: Any, options: dict[str, Any], named: str
) -> None:
    parameter = nn.Parameter(torch.ones(3))
    ctx = context_of(parameter, kind([parameter], **options))
    with pytest.warns(GradwireWarning, match=named):
        assert not thresholds(3, ctx).any()
    with pytest.warns(GradwireWarning, match="sent without loss"):
        assert not numerators(3, ctx).any()


def test_it_is_said_once() -> None:
    parameter = nn.Parameter(torch.ones(3))
    ctx = context_of(parameter, torch.optim.NAdam([parameter]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            thresholds(3, ctx)
    assert len(said) == 1


def test_float64_and_complex_parameters_are_refused() -> None:
    with pytest.warns(GradwireWarning, match="float64"):
        assert not thresholds(
            2, ExchangeContext(0, 0, 0, 1, replicas=lambda _: seen(torch.ones(2).double()))
        ).any()
    refusal = numerator_of(seen(torch.ones(2, dtype=torch.complex64)))
    assert refusal == "SGD with complex parameters"


@looped(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.0}),
        (torch.optim.Adam, {"lr": 0.0}),
        (torch.optim.RMSprop, {"lr": 0.0}),
        (torch.optim.Adagrad, {"lr": 0.0}),
    ],
)
def test_a_rate_of_zero_as_a_warm_up_starts_with_is_no_error(kind: Any, options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert not thresholds(3, context_of(parameter, kind([parameter], **options))).any()


def test_dampening_of_one_leaves_the_gradient_out_after_the_first_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, dampening=1.0)
    assert thresholds(3, context_of(parameter, optimizer)).tolist() == [128] * 3
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert not thresholds(3, context_of(parameter, optimizer)).any()
