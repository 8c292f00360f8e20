"""Every recipe is in the table, and what an adaptive one decides is in it too."""

from __future__ import annotations

import pytest

from gradwire import recipes
from gradwire.exchange.base import Exchange, parts
from tests.laws.cases import ADAPTIVE, EXCHANGES, RECIPES, decided


def test_every_recipe_is_in_the_tables_of_the_laws() -> None:
    listed = {recipes.recipe(text).name for text in (*RECIPES, *ADAPTIVE)}
    assert listed == set(recipes.names())


@pytest.mark.parametrize(("text", "ratio"), [(text, ratio) for text in ADAPTIVE for ratio in ADAPTIVE[text]])
@pytest.mark.parametrize("world", [2, 3])
def test_what_an_adaptive_recipe_decides_is_of_a_kind_the_laws_know(
    text: str, ratio: float, world: int
) -> None:
    chosen = decided(text, ratio, world).exchange
    kinds = {_shape(case.exchange) for case in EXCHANGES if case.name.startswith("recipe")}
    assert _shape(chosen) in kinds


def _shape(exchange: Exchange) -> str:
    """The nesting of classes, without the numbers."""
    return "(".join(type(part).__name__ for part in parts(exchange))
