"""Every recipe is in the table, and what an adaptive one decides is in it too."""

from __future__ import annotations

from gradwire import recipes
from gradwire.exchange.base import Exchange, parts
from tests.laws.cases import EXCHANGES, decided
from tests.support.looped import looped
from tests.support.recipes import DECIDES, EVERY_RECIPE, LAWS, LONG_RUNS, ROWS, TRAINS, kind_of_text


def test_every_recipe_has_a_row_and_is_tried_in_every_way() -> None:
    assert set(ROWS) == set(recipes.names())
    for texts in ((*LAWS, *DECIDES), EVERY_RECIPE.values(), LONG_RUNS):
        assert {recipes.recipe(text).name for text in texts} == set(ROWS)


def test_each_class_of_exchange_trains_on_real_ranks() -> None:
    every = {kind_of_text(text) for text in (*LAWS, *DECIDES, *EVERY_RECIPE.values(), *LONG_RUNS)}
    assert {kind_of_text(text) for text in TRAINS} == every


@looped(("text", "ratio"), [(text, ratio) for text in DECIDES for ratio in DECIDES[text]])
@looped("world", [2, 3])
def test_what_an_adaptive_recipe_decides_is_of_a_kind_the_laws_know(
    text: str, ratio: float, world: int
) -> None:
    kinds = {_shape(case.exchange) for case in EXCHANGES if case.name.startswith("recipe")}
    assert {_shape(each.exchange) for each in decided(text, ratio, world)} <= kinds


def _shape(exchange: Exchange) -> str:
    """The nesting of classes, without the numbers."""
    return "(".join(type(part).__name__ for part in parts(exchange))
