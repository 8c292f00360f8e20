"""Counting how often weights are used, layer by layer, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.codec.select.rates import rated_top_k
from gradwire.measure.uses import FirstForward, layer_rates, multiply_adds
from gradwire.recipes import recipe
from gradwire.unit.context import ExchangeContext, Part
from gradwire_lab.workloads.models import resnet_demo

LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, float]]] = [
    (lambda: nn.Linear(3, 5), (4, 3), {"weight": 4}),
    (lambda: nn.Linear(3, 5), (4, 7, 3), {"weight": 28}),
    (lambda: nn.Conv2d(3, 5, 3), (2, 3, 10, 8), {"weight": 2 * 8 * 6}),
    (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4), (1, 4, 8, 8), {"weight": 16}),
    (lambda: nn.Conv1d(3, 5, 3, padding=1), (2, 3, 9), {"weight": 18}),
    (lambda: nn.ConvTranspose2d(3, 5, 4, stride=4), (2, 3, 5, 5), {"weight": 50}),
    (lambda: nn.LSTM(3, 5), (7, 2, 3), {"weight_ih_l0": 14, "weight_hh_l0": 14}),
    (
        lambda: nn.GRU(3, 5, bidirectional=True, batch_first=True),
        (2, 7, 3),
        dict.fromkeys(("weight_ih_l0", "weight_hh_l0", "weight_ih_l0_reverse", "weight_hh_l0_reverse"), 14),
    ),
]


@pytest.mark.parametrize(("make", "shape", "counted"), LAYERS)
def test_a_layer_alone(
    make: Callable[[], nn.Module], shape: tuple[int, ...], counted: dict[str, float]
) -> None:
    assert multiply_adds(make(), torch.zeros(shape)) == counted


def test_an_embedding_counts_look_ups_per_row() -> None:
    assert multiply_adds(nn.Embedding(10, 4), torch.zeros(5, 6, dtype=torch.int64)) == {"weight": 3.0}


def test_attention_is_counted_although_its_projections_are_not_called() -> None:
    x = torch.zeros(2, 7, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    assert multiply_adds(attention, x, x, x) == {"in_proj_weight": 14, "out_proj.weight": 14}
    # torch's fast path calls no module at all, but is not taken where there are hooks.
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = multiply_adds(encoder, x)
    assert found["linear1.weight"] == found["linear2.weight"] == found["self_attn.out_proj.weight"] == 14


class Shared(nn.Module):
    """One layer called twice, with a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(self.inner(x)))
        return out


def test_a_layer_that_runs_twice_adds_up_and_nothing_is_left_changed() -> None:
    model = Shared()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.norm.eval()
    assert multiply_adds(model, torch.ones(3, 4)) == {"inner.weight": 6}
    assert (model.training, model.inner.training, model.norm.training) == (True, True, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_modes_and_hooks_are_put_back_after_an_error() -> None:
    model = Shared()
    with pytest.raises(RuntimeError):
        multiply_adds(model, torch.ones(3, 5))
    assert model.inner.training
    assert not model.inner._forward_hooks


def test_rates_of_a_residual_network_fall_with_its_images() -> None:
    # 32x32, 16x16 and 8x8 positions in its three stages of two blocks, 1 in its classifier.
    model = resnet_demo(3, 10)
    parameters = dict(model.named_parameters())
    rates = layer_rates(model, torch.zeros(32, 3, 32, 32))
    parts = tuple(Part(name, tuple(p.shape), 0, p.numel()) for name, p in parameters.items() if p.dim() > 1)
    built = recipe(f"scalecom(rates={rates}, warmup_steps=0)").build()
    total = sum(part.numel for part in parts)
    ctx = ExchangeContext(step=0, unit=0, rank=0, world=1, parts=parts)
    sent = built.exchange.rounds(total, torch.float32, ctx)[-1].numel
    by_hand = 0
    for name, p in parameters.items():
        if p.dim() > 1:
            rate = 400 if name.startswith(("stages.4", "stages.5", "head")) else 25
            by_hand += -(-p.numel() // rate)
    assert sent == by_hand


def any_rate(rate: Any) -> None:
    rated_top_k(10, {"*": rate})


@pytest.mark.parametrize("rate", [0, -3, 2.5])
def test_a_rate_that_is_none_raises(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a whole number from 1 on"):
        any_rate(rate)


def test_the_first_forward_pass_that_happens_is_counted_and_no_later_one() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    first = FirstForward(model)
    for samples in (4, 9):
        first.begin()
        model(torch.zeros(samples, 3))
        first.end()
    assert first.uses == {"0.weight": 4.0, "1.weight": 4.0} == multiply_adds(model, torch.zeros(4, 3))
    assert not any(each._forward_hooks for each in model.modules())


def test_a_forward_pass_that_failed_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    first = FirstForward(model)
    first.begin()
    model[0](torch.zeros(4, 3))
    first.give_up()
    model(torch.zeros(1000, 3))  # an evaluation
    first.end()
    assert first.uses == {}
    first.begin()
    model[0](torch.zeros(4, 3))
    first.begin()
    model(torch.zeros(2, 3))
    first.end()
    assert first.uses == {"0.weight": 2.0, "1.weight": 2.0}


class Odd(nn.Linear):
    """Returns more than a linear layer does."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(x), 1


def test_a_layer_that_does_otherwise_is_left_out_where_training_goes_on() -> None:
    model = nn.ModuleList([Odd(3, 5), nn.Linear(5, 2)])
    first = FirstForward(model)
    first.begin()
    model[1](model[0](torch.zeros(4, 3))[0])
    first.end()
    assert first.uses == {"1.weight": 4.0}
    with pytest.raises(AttributeError):
        multiply_adds(model[0], torch.zeros(4, 3))


def test_no_pattern_covers_weights_that_nobody_could_count() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.own = nn.Linear(3, 5), nn.Parameter(torch.zeros(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) @ self.own

    whole = nn.Sequential(nn.Sequential(Model()))
    assert layer_rates(whole, torch.zeros(4, 3)) == {"0.0.fc.*": 400}
