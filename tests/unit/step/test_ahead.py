"""Gradients that are encoded as they come."""

from __future__ import annotations

import gc

import torch

from gradwire.comm import Comm, run_ranks
from gradwire.kernels.layouts import CodedPieces
from tests.support.rig import ALONE, REVERSED, Rig, flat, gradients


def test_places_of_codes_are_kept_for_the_buckets_that_come_and_not_for_those_that_are_gone() -> None:
    """DDP makes other buckets in its second step, and under `join()`."""

    def rank(comm: Comm) -> tuple[list[int], bool]:
        rig, other = Rig(comm, "int8", commits="late"), Rig(comm, "int8")
        counts, are_same = [], True
        for step in range(8):
            grads, buckets = gradients(comm.rank, step), (ALONE, REVERSED)[step % 2]
            coded, plain = rig.step(grads, buckets), other.step(grads, buckets)
            are_same &= torch.equal(flat(coded.mean), flat(plain.mean))
            if step in (1, 6, 7):  # all objects of the process are looked at
                gc.collect()
                counts.append(sum(type(each) is CodedPieces for each in gc.get_objects()))
        return counts, are_same

    (((both, *later), are_same),) = run_ranks(1, rank)
    assert are_same
    assert both > 0
    assert max(later) <= both
