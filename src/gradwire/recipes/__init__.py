"""Named compositions, one paper and one file each."""

from gradwire.recipes import (  # register themselves
    auto,
    bf16,
    covap,
    dense,
    fp16,
    leader_topk,
    local_every,
    randomk,
    topk,
)
from gradwire.recipes.base import REGISTRY, Composition, Decide, Entry, register
from gradwire.recipes.parse import Recipe, recipe

__all__ = ["Composition", "Decide", "Entry", "Recipe", "entries", "names", "recipe", "register"]

_MODULES = (auto, bf16, covap, dense, fp16, leader_topk, local_every, randomk, topk)


def names() -> tuple[str, ...]:
    """Names of all recipes.

    >>> "covap" in names()
    True
    """
    return tuple(sorted(REGISTRY))


def entries() -> tuple[Entry, ...]:
    """All recipes with their options and one-line summaries."""
    return tuple(REGISTRY[name] for name in names())
