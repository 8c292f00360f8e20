"""The engine's two comms: gradients over one, and all that ranks agree on over the other."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.errors import PeerFailed
from gradwire.measure.observed import Observed
from tests.support.rig import Rig, gradients

STEPS = 3


@pytest.mark.parametrize("text", ["dense", "fp16", "topk(ratio=0.1)", "covap(interval=2)", "auto"])
def test_the_verdict_travels_over_the_control_comm_and_gradients_do_not(text: str) -> None:
    def rank(comm: Comm) -> None:
        data, control = Observed(comm), Observed(comm)
        together, apart = Rig(comm, text), Rig(data, text, control=control)
        for step in range(STEPS):
            expected = together.step(gradients(comm.rank, step))
            before = len(data.rounds)
            outcome = apart.step(gradients(comm.rank, step))
            assert outcome.step.committed
            assert outcome.mean.keys() == expected.mean.keys()
            assert all(torch.equal(outcome.mean[name], expected.mean[name]) for name in expected.mean)
            assert outcome.step.metered_bytes == outcome.step.predicted_bytes
            assert len(data.rounds) > before
        assert [each.verb for each in control.rounds] == ["all_reduce"] * STEPS
        assert all(each.numel % comm.world == 0 for each in control.rounds)

    run_ranks(3, rank)


def test_a_step_without_small_gradients_has_a_verdict_over_the_control_comm() -> None:
    shapes = {"weight": (200, 300)}

    def rank(comm: Comm) -> int:
        control = Observed(comm)
        rig = Rig(comm, "dense", shapes=shapes, control=control)
        grads = {"weight": torch.full((60_000,), float(comm.rank))}
        assert rig.step(grads, (("weight",),)).step.committed
        return len(control.rounds)

    assert run_ranks(2, rank) == [1, 1]


def test_a_failure_is_told_over_the_control_comm() -> None:
    full = OSError("no room")

    def fold(*_: object) -> None:
        raise full

    def rank(comm: Comm) -> BaseException | None:
        rig = Rig(comm, "topk(ratio=0.1)", control=Observed(comm))
        if comm.rank == 0:
            rig.engine.layout.lanes[0].fold = fold  # type: ignore[assignment,method-assign]
        return rig.step(gradients(comm.rank, 0)).error

    own, *others = run_ranks(3, rank)
    assert own is full
    assert all(isinstance(error, PeerFailed) for error in others)
