"""Dense steps while some rank lacks kernels: all ranks change over in the same step."""

from __future__ import annotations

from functools import partial
from itertools import repeat

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.control.kernels import KernelsController
from gradwire.recipes import recipe
from tests.support.rig import Rig, gradients

READY = (2, 4, 0, 1)
"""By rank, the step from which its kernels are there."""
STEPS = 8


def _trained(comm: Comm, text: str, per_node: int, awaits: bool) -> list[Tensor]:
    """The means of all steps. Without `awaits`, a dense recipe is replaced in the step when all are ready."""
    asked, last = recipe(text).build(), max(READY[: comm.world])
    has_kernels = iter([*repeat(False, READY[comm.rank]), *repeat(True, STEPS)])
    if awaits:
        before = KernelsController(asked, lambda: next(has_kernels))
        rig = Rig(comm, text, per_node=per_node, before=before)
    else:
        rig = Rig(comm, "dense", per_node=per_node)
    means = []
    for step in range(STEPS):
        if step == last + 1 and not awaits:
            rig.reducer.install(asked)
        outcome = rig.step(gradients(comm.rank, step))
        assert outcome.error is None
        assert rig.reducer.awaits_kernels == (awaits and step < last)
        means.append(outcome.flat())
    assert rig.reducer.running == asked.text
    return means


@pytest.mark.parametrize("text", ["int4", "topk(ratio=0.05)", "gcomp"])
def test_every_rank_changes_over_when_the_last_one_has_its_kernels(text: str) -> None:
    found = run_ranks(3, partial(_trained, text=text, per_node=1, awaits=True))
    wanted = run_ranks(3, partial(_trained, text=text, per_node=1, awaits=False))
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_ranks_that_share_nodes_change_over_together() -> None:
    found = run_ranks(4, partial(_trained, text="int4", per_node=2, awaits=True))
    wanted = run_ranks(4, partial(_trained, text="int4", per_node=2, awaits=False))
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_recipe_that_measures_begins_to_when_kernels_are_there() -> None:
    def measures(comm: Comm) -> list[bool]:
        has_kernels = iter([*repeat(False, READY[comm.rank]), *repeat(True, STEPS)])
        before = KernelsController(recipe("auto").build(), lambda: next(has_kernels))
        rig = Rig(comm, "auto", before=before)
        found = []
        for step in range(STEPS):
            found.append(rig.reducer.measuring)
            assert rig.step(gradients(comm.rank, step)).error is None
        return found

    assert run_ranks(3, measures) == [[False] * 5 + [True] * 3] * 3
