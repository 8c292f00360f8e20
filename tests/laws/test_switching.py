"""Another recipe between two steps keeps what is unsent, whatever the two are."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from gradwire._api.switch import switch
from gradwire.comm import Comm, run_ranks
from gradwire.memory import UNSENT
from gradwire.recipes import recipe
from gradwire.step.layout import Layout
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, REMEMBERING, kind
from tests.support.rig import NAMES, Rig, flat, gradients

PAIRS = [
    *pairwise((*REMEMBERING, REMEMBERING[0])),
    *((name, "dense") for name in REMEMBERING[::6]),
    *((name, "qsgd") for name in REMEMBERING[3::6]),
    ("fp16", "topk"),
    ("topk", "auto"),
]
"""Every recipe that remembers follows one and is followed by one; some by what remembers nothing."""


def unsent(layout: Layout) -> Tensor:
    """As gradient, of all that is remembered: memory times what one unit of it stands for."""
    weights = {name: flat_buffer.memory.weight for name, (flat_buffer, _slot) in layout.slots.items()}
    kept = {
        name: weights[name] * layout.memory(name).double()
        for name in NAMES
        if UNSENT in layout.planes_of(name)
    }
    return flat({name: kept.get(name, torch.zeros(NUMEL[name])) for name in NAMES})


NUMEL = {name: grad.numel() for name, grad in gradients(0, 0).items()}


def _unchecked(_layout: Layout) -> None:
    """No optimizer to suit."""


@looped(("before", "after"), PAIRS, by=lambda pair: kind(pair[0]), few=1)
def test_a_switch_keeps_all_that_is_unsent(before: str, after: str) -> None:
    text = EVERY_RECIPE.get(after, after)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[before])
        for step in range(2):
            assert rig.step(gradients(comm.rank, step)).error is None
        was = unsent(rig.reducer.layout)
        switch(rig.reducer, text, _unchecked)
        # A memory of another weight is divided by it: two roundings of each number.
        assert torch.allclose(
            unsent(rig.reducer.layout), was, rtol=2 * torch.finfo(torch.float32).eps, atol=0.0
        )
        assert rig.step(gradients(comm.rank, 2)).error is None
        assert rig.reducer.recipe == recipe(text)

    run_ranks(2, rank)


def test_what_has_no_memory_is_preceded_by_a_step_that_sends_all_that_is_unsent() -> None:
    def rank(comm: Comm) -> tuple[list[str], Tensor]:
        rig, plans = Rig(comm, "topk(ratio=0.05)"), []
        total = torch.zeros(0)
        for step in range(5):
            outcome = rig.step(gradients(comm.rank, step))
            plans.append(outcome.step.recipe.partition("(")[0])
            total = outcome.flat() if step == 0 else total + outcome.flat()
            if step == 1:
                switch(rig.reducer, "dense", _unchecked)
        assert rig.reducer.layout.is_plain
        return plans, total

    ranks = run_ranks(3, rank)
    assert [plans for plans, _ in ranks] == [["topk", "topk", "local_every", "dense", "dense"]] * 3
    given = sum(flat(gradients(number, step)) for number in range(3) for step in range(5)) / 3
    # Five means of three numbers below 8, each of at most 3 + 2 roundings.
    assert (ranks[0][1] - given).abs().max() < 5 * 5 * 8 * torch.finfo(torch.float32).eps
