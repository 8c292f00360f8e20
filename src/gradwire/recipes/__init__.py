"""Recipes: named compositions. A paper has a file; so has a family, whose papers share their parts.
`catalogue` says in which module each is.

The other files are no recipes. `narrow`, `units` and `low_bits` are parts of several, `parse` reads their
texts, and `trial`, `flush` and `regroup` make compositions out of other recipes while a training runs.
"""

from gradwire.recipes.base import Composition, Decision, RecipeEntry, register
from gradwire.recipes.parse import Recipe, entries, names, recipe

__all__ = ["Composition", "Decision", "Recipe", "RecipeEntry", "entries", "names", "recipe", "register"]
