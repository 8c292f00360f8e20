"""Recipes: named compositions, one paper and one file each. `catalogue` says in which module each is."""

from gradwire.recipes.base import Composition, Decision, Entry, register
from gradwire.recipes.parse import Recipe, entries, names, recipe

__all__ = ["Composition", "Decision", "Entry", "Recipe", "entries", "names", "recipe", "register"]
