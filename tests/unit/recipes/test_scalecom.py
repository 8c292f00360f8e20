"""ScaleCom's rates per layer, by what a forward pass does with each weight."""

from __future__ import annotations

import pytest
import torch

from gradwire.arena import ParameterSpec
from gradwire.comm import Comm, run_ranks
from gradwire.ddp.survey import surveyed
from gradwire.plan import Facts
from gradwire.recipes import Composition, recipe
from gradwire.recipes.base import Counting

AUTO = "scalecom(rates='auto', warmup_steps=3)"


def _counting() -> Counting:
    built = recipe(AUTO).build()
    assert isinstance(built, Counting)
    return built


def test_rates_follow_from_uses_and_are_in_the_text() -> None:
    uses = {"conv.weight": 32 * 1024.0, "fc.weight": 32.0, "fc.bias": 0.0}
    chosen = _counting()(Facts(1.0, 1.0, 2, uses=uses))
    assert "rates={'conv.*': 25, 'fc.*': 400}" in chosen.text
    again = recipe(chosen.text).build()
    assert isinstance(again, Composition)
    assert again.exchange == chosen.exchange


def test_ranks_with_other_batches_agree_on_the_most() -> None:
    def rank(comm: Comm) -> Facts:
        uses = {"a": 10.0 * (1 + comm.rank), "b": 100.0 / (1 + comm.rank), "vector": 5.0}
        shapes = {"a": (2, 5), "b": (2, 5), "c": (2, 5), "vector": (5,)}
        specs = [ParameterSpec(name, shape, torch.float32, 10) for name, shape in shapes.items()]
        return surveyed(Facts(1.0, 1.0, comm.world), _counting(), comm, specs, uses)

    for facts in run_ranks(3, rank):
        assert facts.uses == {"a": 30.0, "b": 100.0, "c": 0.0}


@pytest.mark.parametrize("option", ["rates='all'", "rates='auto', beta=0.0", "rates='auto', rate=0"])
def test_wrong_options_are_refused_at_once(option: str) -> None:
    with pytest.raises(ValueError, match=r"rate|beta"):
        recipe(f"scalecom({option})")
