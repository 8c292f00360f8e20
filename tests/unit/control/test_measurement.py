"""Dense steps that measure: some run as plain DDP would, some send one bucket after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, Round, run_ranks
from gradwire.measure.link import votes_alone
from gradwire.planning.profiler import DISCARDED, MEASURED, ORDINARY
from tests.support.rig import ONE_BUCKET, REVERSED, SHAPES, Rig, gradients

UNTIL = {"auto": DISCARDED + ORDINARY + MEASURED, "covap": DISCARDED + MEASURED}


class Counted(Comm):
    """A world of one, in which a collective is under way until somebody waits for it."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.under_way: set[UnderWay] = set()
        self.most = 0

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> UnderWay:
        pending = UnderWay(self)
        self.under_way.add(pending)
        self.most = max(self.most, len(self.under_way))
        return pending


class UnderWay:
    def __init__(self, comm: Counted) -> None:
        self._comm = comm

    def wait(self) -> None:
        self._comm.under_way.discard(self)

    def then(self, callback: Callable[[], None]) -> None:
        callback()


def _most_under_way(text: str, buckets: tuple[tuple[str, ...], ...], **options: object) -> list[int]:
    """By step."""
    comm, found = Counted(), []
    rig = Rig(comm, text, **options)  # type: ignore[arg-type]
    for step in range(UNTIL[text]):
        comm.most = 0
        assert rig.step(gradients(0, step), buckets).error is None
        found.append(comm.most)
    assert not rig.reducer.measuring
    return found


@pytest.mark.parametrize("text", UNTIL)
def test_the_status_vote_of_an_ordinary_step_goes_out_beside_the_last_bucket(text: str) -> None:
    assert _most_under_way(text, REVERSED) == (UNTIL[text] - MEASURED) * [2] + MEASURED * [1]


def test_a_step_taken_apart_has_one_collective_under_way() -> None:
    # Two exchanges within a bucket make three runs of it. In most steps the status vote goes with the last.
    found = _most_under_way("auto", ONE_BUCKET, policy={"middle.weight": "fp16"})
    ordinary = [3 if votes_alone(step) else 4 for step in range(UNTIL["auto"] - MEASURED)]
    assert found == ordinary + MEASURED * [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_facts_know_the_buckets_and_the_bytes_of_the_gradient(dtype: torch.dtype) -> None:
    def rank(comm: Comm) -> tuple[tuple[int, ...], float]:
        rig = Rig(comm, "covap", dtype=dtype)
        for step in range(UNTIL["covap"]):
            rig.step(gradients(comm.rank, step, dtype))
        assert rig.reducer.facts is not None
        return rig.reducer.facts.buckets, rig.reducer.facts.gradient_bytes

    buckets = tuple(sum(torch.Size(SHAPES[name]).numel() for name in names) for names in REVERSED)
    assert run_ranks(1, rank) == [(buckets, float(sum(buckets) * dtype.itemsize))]
