"""Real gloo ranks: lossless training is DDP's bit for bit.

With two ranks a sum has two addends, x_0/2 and x_1/2, so that there is only one order, DDP's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import batch, digest, perceptron, train
from tests.support.states import own_state
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
}


@dataclass(frozen=True)
class Run:
    """Sixty steps, past a change of tables: the digest of the parameters, and how they moved."""

    digest: str
    start: tuple[float, ...]
    end: tuple[float, ...]
    ratio: float
    """Of bytes sent to those of DDP; 1 without a wire."""


def trained(kind: str, recipe: str | None) -> Run:
    """With the optimizer of this kind; `None` is plain DDP."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    start, optimizer = _flat(ddp), KINDS[kind](ddp)
    wire = None if recipe is None else gradwire.attach(ddp, optimizer, recipe)
    train(ddp, optimizer, range(60))
    return Run(digest(ddp), start, _flat(ddp), 1.0 if wire is None else wire.report().ratio)


def _flat(module: nn.Module) -> tuple[float, ...]:
    return tuple(nn.utils.parameters_to_vector(module.parameters()).detach().tolist())


def digest_with_scale(init_scale: float | None) -> str:
    """Of the parameters after sixty steps of near-lossless training with this loss scale, or without one."""
    scaler = None
    if init_scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=10**6)
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    optimizer = KINDS["adamw"](ddp)
    gradwire.attach(ddp, optimizer, "gcomp", scaler=scaler)
    if scaler is None:
        train(ddp, optimizer, range(60))
    else:
        train_scaled(ddp, optimizer, scaler, range(60))
    return digest(ddp)


def train_scaled(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    steps: range,
) -> None:
    """As `train`, with losses scaled and gradients scaled back."""
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(ddp(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()


@dataclass(frozen=True)
class Resumed:
    """A run of twelve steps, and one that has loaded its state after six: digests of the parameters."""

    kinds_saved: tuple[str, ...]
    """What the exchanges keep."""
    whole: str
    resumed: str


def resumed(recipe: str) -> Resumed:
    """Save after six steps, and load into a model that has made none."""

    def fresh() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
        optimizer = KINDS["adamw"](ddp)
        return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe)

    ddp, optimizer, wire = fresh()
    train(ddp, optimizer, range(6))
    saved = ddp.state_dict(), optimizer.state_dict(), own_state(wire)
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved)
    train(ddp, optimizer, range(6, 12))
    other, its_optimizer, its_wire = fresh()
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_wire.load_state_dict(saved[2])
    train(other, its_optimizer, range(6, 12))
    return Resumed(tuple(saved[2]["kept"]), digest(ddp), digest(other))


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_training_on_two_ranks_is_ddps_bit_for_bit(two: Ranks, kind: str) -> None:
    plain, lossless = two(trained, kind, None), two(trained, kind, "gcomp(mode='lossless')")
    assert [rank.digest for rank in lossless] == [rank.digest for rank in plain]


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["gcomp", "gcomp(mode='levels')"])
def test_near_lossless_training_stays_where_ddp_goes(two: Ranks, kind: str, recipe: str) -> None:
    plain, (one, other) = two(trained, kind, None)[0], two(trained, kind, recipe)
    assert one.digest == other.digest
    way = torch.tensor(plain.end) - torch.tensor(plain.start)
    away = torch.tensor(one.end) - torch.tensor(plain.end)
    # A step moves a parameter by 2 ulp at most, 2^-22 of it, and these steps by some 10^-3 of it: 60 of
    # them stay within 60·2^-22·10^3 of their way or so, if training does not spread what was close.
    assert float(away.norm() / way.norm()) < 0.015
    assert one.ratio < 0.9


@pytest.mark.rest
def test_a_loss_scale_of_a_power_of_two_changes_no_bit(two: Ranks) -> None:
    assert two(digest_with_scale, 2.0**12) == two(digest_with_scale, None)


def test_a_resumed_run_goes_on_with_its_tables(two: Ranks) -> None:
    for found in two(resumed, "gcomp(refresh=4)"):
        assert any(kind.startswith("symbols") for kind in found.kinds_saved)
        assert found.resumed == found.whole
