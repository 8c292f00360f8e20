"""Named compositions, one paper and one file each."""

from importlib import import_module
from pkgutil import iter_modules

from gradwire.recipes.base import REGISTRY, Composition, Decide, Entry, register
from gradwire.recipes.parse import Recipe, recipe

__all__ = ["Composition", "Decide", "Entry", "Recipe", "entries", "names", "recipe", "register"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")  # a recipe registers itself


def names() -> tuple[str, ...]:
    """Names of all recipes.

    >>> "covap" in names()
    True
    """
    return tuple(sorted(REGISTRY))


def entries() -> tuple[Entry, ...]:
    """All recipes with their options and one-line summaries."""
    return tuple(REGISTRY[name] for name in names())
