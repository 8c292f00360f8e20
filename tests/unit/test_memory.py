"""Memories: the residual's schedule, low-pass and momentum correction, and what the papers' formulas say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.comm import ThreadComm, run_ranks
from gradwire.contrib.dgc import MomentumCorrection
from gradwire.exchange.base import run
from gradwire.exchange.payloads import gather
from gradwire.memory import MOMENTUM, UNSENT, Gradients, LowPass, Memory, Residual
from gradwire.unit.context import ExchangeContext
from tests.support.compensation import Compensation
from tests.support.looped import looped

COVAP_SMALL = Residual(start=0.5, rise=0.1, every=50)
COVAP_LARGE = Residual(start=0.2, rise=0.1, every=100)


@looped(
    ("memory", "step", "coefficient"),
    [
        (Residual(), 0, 1.0),
        (Residual(), 10**9, 1.0),
        (COVAP_SMALL, 0, 0.5),
        (COVAP_SMALL, 49, 0.5),
        (COVAP_SMALL, 50, 0.6),
        (COVAP_SMALL, 120, 0.7),
        (COVAP_SMALL, 199, 0.8),
        (COVAP_SMALL, 249, 0.9),
        (COVAP_SMALL, 250, 1.0),
        (COVAP_SMALL, 10_000, 1.0),
        (COVAP_LARGE, 99, 0.2),
        (COVAP_LARGE, 100, 0.3),
        (COVAP_LARGE, 799, 0.9),
        (COVAP_LARGE, 800, 1.0),
        (Residual(start=0.0, rise=0.5, every=1), 1, 0.5),
    ],
)
def test_coefficient(memory: Residual, step: int, coefficient: float) -> None:
    assert memory.coefficient(step) == coefficient


def test_compensate_applies_the_coefficient_of_the_step_and_the_scale_of_the_gradient() -> None:
    working, committed, grad = torch.empty(2), torch.tensor([2.0, 4.0]), torch.tensor([8.0, 16.0])
    COVAP_SMALL.compensate({UNSENT: working}, {UNSENT: committed}, Gradients.of(grad, 0.25), step=49, world=3)
    assert working.tolist() == [3.0, 6.0]


def test_compensate_leaves_memory_and_gradient_alone() -> None:
    working, committed, grad = torch.empty(2), torch.tensor([2.0, 4.0]), torch.tensor([8.0, 16.0])
    Residual().compensate({UNSENT: working}, {UNSENT: committed}, Gradients.of(grad), step=0, world=3)
    assert committed.tolist() == [2.0, 4.0]
    assert grad.tolist() == [8.0, 16.0]


@looped(
    ("options", "words"),
    [({"start": 1.1}, "start=1.1"), ({"start": -0.1}, "start=-0.1"), ({"every": 0}, "every=0")],
)
def test_schedules_outside_their_range_raise(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Residual(**options)


SIZE = 50


def gradient(step: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


def sent(planes: Compensation, grad: Tensor, ratio: float, step: int = 0) -> Tensor:
    """What one rank alone sends of the error-fed gradient."""

    def body(comm: ThreadComm) -> Tensor:
        mean = torch.empty_like(grad)
        run(
            gather(sparse(top_k(ratio))),
            planes.compensate(grad, step),
            mean,
            comm,
            ExchangeContext(step, 0, 0, 1),
        )
        return mean

    (mean,) = run_ranks(1, body)
    planes.commit()
    return mean


@looped("beta", [1.0, 0.3, 0.1])
def test_low_pass_keeps_the_invariant_of_equation_5(beta: float) -> None:
    planes, came, went = (
        Compensation(LowPass(beta), SIZE),
        torch.zeros(SIZE).double(),
        torch.zeros(SIZE).double(),
    )
    for step in range(40):
        came += gradient(step)
        went += sent(planes, gradient(step), 0.1, step)
    # m is at most a few units large; each of 40 steps rounds it a few times, and 1/β magnifies that.
    bound = 40 * 8 * torch.finfo(torch.float32).eps * 10 / beta
    assert (went + planes.unsent.double() * planes.memory.weight - came).abs().max() <= bound


def test_low_pass_mixes_the_old_memory_with_what_is_left() -> None:
    planes = Compensation(LowPass(0.25), 2)
    planes.unsent.copy_(torch.tensor([8.0, 4.0]))
    # x = (9, 5): the first travels, and of it 0 is left.
    assert sent(planes, torch.tensor([1.0, 1.0]), 0.5).tolist() == [9.0, 0.0]
    assert planes.unsent.tolist() == [0.75 * 8, 0.75 * 4 + 0.25 * 5]


def test_momentum_of_everything_sent_at_once_without_masking_is_that_of_sgd() -> None:
    planes, velocity = Compensation(MomentumCorrection(0.9, masking=False), SIZE), torch.zeros(SIZE)
    for step in range(20):
        velocity = 0.9 * velocity + gradient(step)
        # Float32 sums in another order: a few roundings of numbers below 10.
        torch.testing.assert_close(sent(planes, gradient(step), 1.0), velocity, rtol=0, atol=1e-5)


def test_momentum_that_waits_is_what_would_have_been_applied_meanwhile() -> None:
    planes, velocity, owed = Compensation(MomentumCorrection(0.5), 1), 0.0, 0.0
    for step in range(4):
        velocity = 0.5 * velocity + 2.0**step
        owed += velocity
        planes.compensate(torch.tensor([2.0**step]))
        planes.commit()
    assert planes.unsent.item() == owed


def test_nesterov_looks_one_step_ahead() -> None:
    planes = Compensation(MomentumCorrection(0.5, nesterov=True), 1)
    planes.compensate(torch.tensor([8.0]))
    planes.commit()
    assert planes.unsent.item() == 0.5 * 8 + 8
    planes.compensate(torch.tensor([4.0]))
    planes.commit()
    assert planes.unsent.item() == 12 + 0.5 * (0.5 * 8 + 4) + 4


@looped("masking", [True, False])
def test_masking_forgets_the_momentum_of_what_was_sent_and_no_other(masking: bool) -> None:
    planes = Compensation(MomentumCorrection(0.9, masking=masking), 4)
    assert sent(planes, torch.tensor([1.0, -9.0, 2.0, 8.0]), 0.5).tolist() == [0.0, -9.0, 0.0, 8.0]
    assert planes.committed[MOMENTUM].tolist() == ([1.0, 0.0, 2.0, 0.0] if masking else [1.0, -9.0, 2.0, 8.0])


@looped("world", [1, 4, 9])
def test_clipping_bounds_the_norm_of_a_parameter_by_its_share(world: int) -> None:
    planes = Compensation(MomentumCorrection(clip=6.0), 2)
    planes.compensate(torch.tensor([30.0, 40.0]), world=world)
    planes.commit()
    assert planes.unsent.norm().item() == pytest.approx(6.0 / math.sqrt(world), rel=1e-6)
    small = torch.tensor([0.3, 0.4])
    other = Compensation(MomentumCorrection(clip=6.0), 2)
    assert torch.equal(other.compensate(small, world=world), small)


@looped("bad", [math.nan, math.inf])
@looped("memory", [LowPass(0.3), MomentumCorrection(clip=1.0), MomentumCorrection()])
def test_a_gradient_that_is_not_finite_is_reported(memory: Memory, bad: float) -> None:
    planes = Compensation(memory, 3)
    seen = memory.compensate(
        planes.working, planes.committed, Gradients.of(torch.tensor([1.0, bad, 2.0])), 0, 2
    )
    assert not seen.finite
    assert not planes.unsent.any()


@looped(
    ("make", "words"),
    [
        (lambda: LowPass(0.0), r"outside \(0, 1\]"),
        (lambda: LowPass(1.1), r"outside \(0, 1\]"),
        (lambda: MomentumCorrection(1.0), r"outside \[0, 1\)"),
        (lambda: MomentumCorrection(clip=0.0), "must be positive"),
    ],
)
def test_options_outside_their_range_raise(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
