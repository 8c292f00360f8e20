"""Small gradients that travel before the tail change nothing but when their bytes pass."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.comm import Comm, run_ranks
from gradwire.comm.base import shortest_sum
from gradwire.control.controller import TOLD
from gradwire.planning.tuning import Tuning
from gradwire.step.status_vote import HEADER
from tests.support.looped import looped
from tests.support.rig import ALONE, BUCKETS, ONE_BUCKET, Outcome, Rig, gradients

TEXT = "topk(ratio=0.1)"


def _steps(comm: Comm, name: str = "reversed", **options: Any) -> list[Outcome]:
    rig = Rig(comm, TEXT, unit_elements=1000, **options)
    return [rig.step(gradients(comm.rank, step), BUCKETS[name]) for step in range(3)]


@looped("buckets", BUCKETS)
@looped("world", [1, 2, 3, 5])
def test_means_are_those_of_the_tail_alone(world: int, buckets: str) -> None:
    early = run_ranks(world, lambda comm: _steps(comm, buckets))
    late = run_ranks(world, lambda comm: _steps(comm, buckets, tuning=Tuning(early_bytes=1 << 40)))
    for one, other in zip(early, late, strict=True):
        assert all(len(step.step.flight.small) == 2 for step in one)
        assert all(len(step.step.flight.small) == 1 for step in other)
        assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(one, other, strict=True))
        if shortest_sum(world) == "library":  # else what rides with the status vote goes direct
            assert [a.step.sent.metered_bytes for a in one] == [b.step.sent.metered_bytes for b in other]


def test_the_order_within_is_that_of_the_layout_whatever_the_buckets() -> None:
    # A ring adds in an order that depends on the position.
    first, *others = (run_ranks(2, lambda comm, name=name: _steps(comm, name)[0]) for name in BUCKETS)
    for other in others:
        for one, two in zip(first, other, strict=True):
            early, _tail = one.step.flight.small
            assert torch.equal(early.buffer, two.step.flight.small[0].buffer)


def test_one_more_all_reduce_and_no_byte_more() -> None:
    for outcome in run_ranks(2, lambda comm: _steps(comm)[-1]):
        step = outcome.step
        early, tail = step.flight.small
        row = HEADER + 4 + TOLD  # 4 of the link
        assert early.buffer.numel() + tail.buffer.numel() == 59 + 1 + 61 + 2 * row
        assert step.sent.metered_bytes == step.sent.predicted_bytes


def test_they_are_under_way_before_the_last_bucket() -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, TEXT, unit_elements=1000)
        outcome = rig.step(gradients(comm.rank, 0), ALONE)
        return [span.unit for span in outcome.step.trace.spans if span.what == "wire"]

    order = run_ranks(2, rank)[0]
    assert order.index("small") < order.index("flat buffer 0 unit 7") < order.index("tail")


@looped("name", ["last.bias", "first.bias"])
def test_a_nan_in_an_early_gradient_poisons_the_step_on_all_ranks(name: str) -> None:
    def rank(comm: Comm) -> Outcome:
        rig, grads = Rig(comm, TEXT, unit_elements=1000), gradients(comm.rank, 0)
        if comm.rank == 1:
            grads[name][0] = torch.nan
        return rig.step(grads, ONE_BUCKET)

    for outcome in run_ranks(3, rank):
        assert not outcome.step.committed
        assert outcome.flat().isnan().all()
        assert not any(memory.any() for memory in outcome.memory.values())
