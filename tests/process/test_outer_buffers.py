"""Real gloo ranks: buffers in rounds of local steps, averaged, frozen, not finite, of shapes that change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver, PerChannelMinMaxObserver

import gradwire
from tests.support.bits import Checksums, checksums
from tests.support.local_steps import (
    EVERY,
    apart,
    common_folder,
    mean_of_all,
    outer,
    plain_sgd,
    steps,
    values,
)
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


class Normed(nn.Module):
    """BatchNorm, a frozen layer, and a mask with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.frozen, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add_(1 + dist.get_rank())
        hidden = torch.tanh(self.frozen(self.norm(self.body(inputs))))
        return self.head(hidden) + self.mask[0]


@dataclass(frozen=True)
class Statistics:
    """After a round: how far a variance is from the mean, and how far it was before; and all that is held."""

    from_mean: float
    from_mean_before: float
    seen: int
    mask: list[float]
    frozen_at_first: Checksums
    frozen: Checksums
    averaged: Checksums
    rounds: int


def buffers() -> Statistics:
    torch.manual_seed(7 + dist.get_rank())
    model = Normed()
    optimizer = optimizer_of(model)
    own: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: own.append(model.norm.running_var.clone()))
    wire = outer(model, optimizer, "topk(ratio=0.1)")
    frozen = checksums(model.frozen.parameters())
    steps(model, optimizer, range(EVERY))
    handle.remove()
    mean, variance = mean_of_all(own[-1]), model.norm.running_var
    return Statistics(
        apart([variance], [mean]),
        apart([own[-1]], [mean]),
        int(model.seen),
        model.mask.tolist(),
        frozen,
        checksums(model.frozen.parameters()),
        checksums([*values(model), model.norm.running_mean, variance]),
        wire.report().step,
    )


def test_statistics_are_averaged_and_what_is_frozen_stays(two: Ranks) -> None:
    one, other = two(buffers)
    for rank, found in enumerate((one, other)):
        assert found.from_mean <= 1e-6
        assert found.from_mean_before > 0.0
        assert found.seen == EVERY * (1 + rank)
        assert found.mask == [0.0, -torch.inf]
        assert found.frozen == found.frozen_at_first == one.frozen
        assert found.averaged == one.averaged
        assert found.rounds == 1


class Seen(nn.Module):
    """A maximum from -inf on, a mean that is NaN until used, numbers by channel, and a table that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((), -torch.inf))
        self.register_buffer("mean", torch.full((), torch.nan))
        self.register_buffer("by_channel", torch.empty(0))
        self.register_buffer("table", torch.ones(1))

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, inputs.max()))
        self.mean.copy_(inputs.mean())
        self.by_channel.resize_(inputs.shape[1]).copy_(inputs.mean(0))
        self.table = torch.ones(len(self.table) + 1)  # a new tensor in its place
        return inputs


class Observed(nn.Module):
    """A perceptron, and what looks at it; `on` says whether that runs."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.body, self.on = perceptron(22), on
        looks = [MinMaxObserver(), MovingAverageMinMaxObserver(), PerChannelMinMaxObserver(), Seen()]
        self.looks = nn.ModuleList(looks if on else [])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body[:2](inputs)  # type: ignore[index]
        for each in self.looks if self.on else ():
            each(hidden.detach())
        out = self.body[2:](hidden)  # type: ignore[index]
        assert isinstance(out, Tensor)
        return out

    def seen(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.looks.named_buffers()}


@dataclass(frozen=True)
class Looked:
    """Parameters beside those of a model without such buffers, and of a resumed run; buffers of both runs."""

    own: Checksums
    own_without: Checksums
    own_resumed: Checksums
    buffers: Checksums
    buffers_resumed: Checksums
    are_finite: bool
    """Those of the shared model."""


def observed(recipe: str, delay: int) -> Looked:
    """Saved in the middle of the second round."""
    folder, end = common_folder(), 4 * EVERY + delay

    def built(on: bool) -> tuple[Observed, torch.optim.Optimizer, gradwire.OuterWire]:
        model = Observed(on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, outer(model, optimizer, recipe, delay=delay)

    (model, optimizer, wire), (plain, theirs, _other) = built(True), built(False)
    steps(plain, theirs, range(end))
    steps(model, optimizer, range(EVERY + 1))
    wire.save(folder)
    steps(model, optimizer, range(EVERY + 1, end))
    again, their_optimizer, resumed_wire = built(True)
    again(batch(0)[0])  # shapes of its own
    resumed_wire.load(folder)
    steps(again, their_optimizer, range(EVERY + 1, end))
    with wire.shared_parameters():
        are_finite = all(bool(each.isfinite().all()) for each in model.seen().values())
    parameters = (checksums(values(each)) for each in (model, plain, again))
    return Looked(*parameters, *(checksums(each.seen().values()) for each in (model, again)), are_finite)


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
@pytest.mark.parametrize("recipe", rest(["dense", "diloco", "int4"], but=["int4"]))
def test_buffers_that_begin_not_finite_or_change_shape_change_nothing(
    two: Ranks, recipe: str, delay: int
) -> None:
    one, other = two(observed, recipe, delay)
    assert one.buffers == other.buffers
    for found in (one, other):
        assert found.own == found.own_without == found.own_resumed
        assert found.buffers == found.buffers_resumed
        assert found.are_finite


@dataclass(frozen=True)
class LookedApart:
    """A buffer of other shapes on some ranks: sizes and a maximum meanwhile, and what is held at the end."""

    sizes: list[int]
    largest: float
    from_mean: float
    from_mean_before: float
    averaged: Checksums
    rounds: int


def observed_by_some() -> LookedApart:
    """Only rank 0 looks for two rounds. Then both do."""
    model = Observed(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = outer(model, optimizer)
    model.on = dist.get_rank() == 0
    steps(model, optimizer, range(2 * EVERY))
    seen = model.seen()
    sizes = [each.numel() for name, each in seen.items() if name.endswith("by_channel")]
    model.on = True
    steps(model, optimizer, range(2 * EVERY, 4 * EVERY))
    last: list[Tensor] = []
    handle = optimizer.register_step_pre_hook(lambda *_: last.append(model.seen()["3.by_channel"]))
    steps(model, optimizer, range(4 * EVERY, 5 * EVERY))
    handle.remove()
    mean, by_channel = mean_of_all(last[-1]), model.seen()["3.by_channel"]
    return LookedApart(
        sizes,
        float(seen["3.largest"]),
        apart([by_channel], [mean]),
        apart([last[-1]], [mean]),
        checksums([*values(model), by_channel]),
        wire.report().step,
    )


def test_a_buffer_of_other_shapes_on_some_ranks_is_each_one_s_own_until_all_have_one(two: Ranks) -> None:
    one, other = two(observed_by_some)
    assert (one.sizes, other.sizes) == ([64], [0])
    assert one.largest == other.largest > -1.0  # rank 1 has taken what rank 0 has seen
    assert one.averaged == other.averaged
    for found in (one, other):
        assert found.from_mean <= 1e-7  # roundings of numbers below one
        assert found.from_mean_before > 0.0
        assert found.rounds == 5


@dataclass(frozen=True)
class Replaced:
    """A variance that was NaN on rank 1, rank 0's, and how far parameters are from the mean."""

    variance: list[float]
    variance_of_rank_0: list[float]
    from_mean: float
    own: Checksums
    rounds: int


def statistics_not_finite() -> Replaced:
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))
    optimizer, variance = optimizer_of(model), model[1].running_var
    assert isinstance(variance, Tensor)
    last: list[Tensor] = []

    def spoil(*_: Any) -> None:
        if dist.get_rank() == 1:
            variance.fill_(torch.nan)
        last[:] = [variance.clone(), *values(model)]

    handle = optimizer.register_step_post_hook(spoil)  # before the hook in which the round comes
    wire = outer(model, optimizer, outer=plain_sgd)
    steps(model, optimizer, range(EVERY))
    handle.remove()
    first, *learned = last
    dist.broadcast(first, 0)
    from_mean = apart([mean_of_all(each) for each in learned], values(model))
    own = checksums(values(model))
    return Replaced(variance.tolist(), first.tolist(), from_mean, own, wire.report().step)


def test_statistics_that_are_not_finite_are_replaced_and_parameters_stay(two: Ranks) -> None:
    one, other = two(statistics_not_finite)
    assert one == other
    assert one.variance == one.variance_of_rank_0
    assert one.from_mean <= 1e-6  # θ₀ − mean(θ₀ − θ), beside the mean
    assert one.rounds == 1
