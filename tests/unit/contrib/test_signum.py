"""SIGNUM's momentum, alone and through whole steps."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.contrib.signs_by_vote import Signum
from gradwire.memory import MOMENTUM, UNSENT, Gradients
from tests.support.rig import NAMES, Rig, gradients

EPS = torch.finfo(torch.float32).eps


def planes() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {MOMENTUM: torch.zeros(3)}, {MOMENTUM: torch.empty(3), UNSENT: torch.empty(3)}


def test_momentum_is_a_mean_of_gradients() -> None:
    committed, working = planes()
    memory = Signum(0.75)
    for step, expected in enumerate((1.0, 1.75, 2.3125)):
        seen = memory.compensate(working, committed, Gradients.of(torch.full((3,), 8.0), 0.5), step, 1)
        assert seen == ((), True)
        assert working[UNSENT].tolist() == working[MOMENTUM].tolist() == [expected] * 3
        memory.update(working, committed)
        committed[MOMENTUM].copy_(working[MOMENTUM])


def test_only_momentum_is_kept_and_the_optimizer_must_have_none() -> None:
    assert Signum().planes == (MOMENTUM,)
    assert Signum(0.9).covers_momentum
    assert not Signum(0.0).covers_momentum


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_momentum_outside_its_range_raises(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 1\)"):
        Signum(momentum)


def test_a_step_applies_the_majority_of_the_ranks_momenta() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "signum(momentum=0.9, scale='none')", unit_elements=389)
        momenta = [{name: torch.zeros_like(grad) for name, grad in gradients(0, 0).items()} for _ in range(3)]
        for step in range(4):
            outcome = rig.step(gradients(comm.rank, step))
            assert outcome.step.committed
            for other, momentum in enumerate(momenta):
                for name, grad in gradients(other, step).items():
                    momentum[name] = 0.9 * momentum[name] + (1 - 0.9) * grad
            for name in NAMES:
                signs = sum(momentum[name].sign() for momentum in momenta)
                # A momentum within its roundings of 0 may have either sign.
                sure = torch.stack([momentum[name].abs() > 16 * EPS for momentum in momenta]).all(0)
                assert torch.equal(outcome.mean[name][sure], torch.as_tensor(signs).sign()[sure])

    run_ranks(3, rank)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_leaves_the_momentum_as_it_was(bad: float) -> None:
    def rank(comm: Comm) -> None:
        rig, clean = (Rig(comm, "signum", unit_elements=389) for _ in range(2))
        for each in (rig, clean):
            each.step(gradients(comm.rank, 0))
        grads = gradients(comm.rank, 1)
        if comm.rank == 1:
            grads["middle.weight"][7] = bad
        outcome = rig.step(grads)
        assert not outcome.step.committed
        assert outcome.flat().isnan().all()
        again, expected = rig.step(gradients(comm.rank, 1)), clean.step(gradients(comm.rank, 1))
        assert torch.equal(again.flat(), expected.flat())

    run_ranks(2, rank)


def test_an_idle_parameter_keeps_its_momentum_and_does_not_vote() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "signum(scale='none')", unit_elements=389)
        rig.step(gradients(comm.rank, 0))
        before = rig.reducer.layout.memory("first.weight", MOMENTUM).clone()
        grads = gradients(comm.rank, 1)
        grads["first.weight"].zero_()
        outcome = rig.step(grads)
        assert not outcome.mean["first.weight"].any()
        assert torch.equal(rig.reducer.layout.memory("first.weight", MOMENTUM), before)

    run_ranks(2, rank)
