"""Every recipe on shards: ranks with one shard exchange as if they were alone, and step with all others."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.recipes import recipe
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, kind
from tests.support.rig import Rig, gradients

SHARDS = ((0, 2), (1, 3))
BAD = 1
"""The step in which one rank has a NaN."""


def _means(rig: Rig, rank: int) -> list[Tensor]:
    found = []
    for step in range(3):
        grads = gradients(rank, step)
        if (step, rank) == (BAD, 3):
            grads["middle.weight"][0] = torch.nan
        outcome = rig.step(grads)
        assert outcome.error is None
        found.append(outcome.flat())
    return found


@looped("name", EVERY_RECIPE, by=kind, few=1)
def test_shards_are_exchanged_as_by_ranks_alone_and_step_together(name: str) -> None:
    text = EVERY_RECIPE[name]

    def rank(comm: Comm) -> tuple[list[Tensor], list[Tensor], int]:
        shard = comm.split(SHARDS)
        together = Rig(shard, text, control=comm)
        return _means(Rig(shard, text), comm.rank), _means(together, comm.rank), together.reducer.step

    found = run_ranks(4, rank)
    assert [step for _alone, _together, step in found] == [2] * 4
    for one, other in SHARDS:
        assert all(torch.equal(a, b) for a, b in zip(found[one][1][::2], found[other][1][::2], strict=True))
    assert all(bool(together[BAD].isnan().all()) for _alone, together, _step in found)
    # Zero tolerance: the same collectives run. Not of those that decide by what they have measured.
    if recipe(text).build().next is None and recipe(text).build().watch is None:
        for alone, together, _step in (found[1], found[3]):  # the shard with the NaN, which it has alone, too
            assert torch.equal(alone[0], together[0])
            assert torch.equal(alone[2], together[2])
