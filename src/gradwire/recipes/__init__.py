"""Recipes: named compositions, one paper and one file each. `catalogue` says in which module each is."""

from gradwire.recipes.base import Composition, Decision, RecipeEntry, register
from gradwire.recipes.parse import Recipe, entries, names, recipe

__all__ = ["Composition", "Decision", "Recipe", "RecipeEntry", "entries", "names", "recipe", "register"]
