"""What the recipes of AR-Topk compose."""

from __future__ import annotations

import pytest
import torch

from gradwire import recipes
from gradwire.recipes import Composition
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import ParameterSpec

NAMES = ("star_topk", "var_topk", "ar_topk")


def composed(text: str) -> Composition:
    return recipes.recipe(text).build()


@pytest.mark.parametrize("name", NAMES)
def test_one_choice_for_the_whole_gradient_or_one_by_unit(name: str) -> None:
    specs = [ParameterSpec("weight", (1 << 12, 1 << 12), torch.float32, 1 << 24)]
    assert list(composed(name).boundaries(specs, world=4)) == []
    assert len(composed(f"{name}(fused=False)").boundaries(specs, world=4)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_s_ratio_by_default(name: str) -> None:
    values = composed(name).exchange.rounds(10_000, torch.float32, ExchangeContext(0, 0, 0, world=4))[-1]
    assert values.numel == 1000 + (2 if name == "ar_topk" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_options_reach_the_wire(name: str) -> None:
    exchange = composed(f"{name}(ratio=0.01, values='fp16', algorithm='tree')").exchange
    values = exchange.rounds(10_000, torch.float32, ExchangeContext(0, 0, 0, world=4))[-1]
    assert (values.dtype, values.algorithm) == (torch.float16, "tree")


@pytest.mark.parametrize("option", ["fused=1", "algorithm='mesh'", "ratio=0", "values='int8'"])
def test_options_out_of_range_raise(option: str) -> None:
    with pytest.raises(ValueError, match=option.split("=")[0]):
        recipes.recipe(f"star_topk({option})")


def test_elections_of_ar_topk_are_those_of_the_other_two() -> None:
    ctx = ExchangeContext(3, 0, 0, world=4)
    for elect, name in (("round_robin", "star_topk"), ("variance", "var_topk")):
        rounds = composed(f"ar_topk(elect={elect!r})").exchange.rounds(1000, torch.float32, ctx)
        assert rounds == composed(name).exchange.rounds(1000, torch.float32, ctx)
    with pytest.raises(ValueError, match="none of round_robin, variance, auto"):
        recipes.recipe("ar_topk(elect='norm')")


def test_a_tree_spreads_places_by_the_librarys_tree_too() -> None:
    ctx = ExchangeContext(0, 0, 0, world=4)
    for algorithm, broadcast in (("tree", "library"), ("ring", "scatter"), ("library", "scatter")):
        places, values = composed(f"star_topk(algorithm={algorithm!r})").exchange.rounds(
            999, torch.float32, ctx
        )
        assert (places.verb, places.algorithm, values.algorithm) == ("broadcast", broadcast, algorithm)


def test_in_the_paper_s_order_ranks_lead_by_the_step_s_number() -> None:
    exchange = composed("star_topk(order='paper')").exchange
    contexts = [ExchangeContext(step, 0, 0, world=4) for step in range(24)]
    led = [exchange.rounds(1000, torch.float32, ctx)[0].src for ctx in contexts]
    assert led == [step % 4 for step in range(24)]
    drawn = [composed("star_topk").exchange.rounds(1000, torch.float32, ctx)[0].src for ctx in contexts]
    assert drawn != led
    with pytest.raises(ValueError, match="order='fixed' is none of random, paper"):
        composed("star_topk(order='fixed')")
