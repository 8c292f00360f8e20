"""Named compositions, one paper and one file each; `catalogue` says where each of them lives."""

from gradwire.recipes.base import Composition, Decide, Entry, register
from gradwire.recipes.parse import Recipe, entries, names, recipe

__all__ = ["Composition", "Decide", "Entry", "Recipe", "entries", "names", "recipe", "register"]
