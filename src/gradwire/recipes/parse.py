"""Recipe strings: `name` or `name(key=value, …)` with Python literals as values."""

from __future__ import annotations

import ast
import difflib
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from gradwire.recipes.base import REGISTRY, Composition, Entry
from gradwire.recipes.catalogue import MODULES


def names() -> tuple[str, ...]:
    """Names of all recipes, ours and those that users have registered.

    >>> "covap" in names()
    True
    """
    return tuple(sorted({*MODULES, *REGISTRY}))


def entries() -> tuple[Entry, ...]:
    """All recipes with their options and one-line summaries. Imports the modules of all."""
    return tuple(_entry(name) for name in names())


def _entry(name: str) -> Entry:
    """The recipe of that name, which is one of `names()`."""
    if name not in REGISTRY:
        import_module(MODULES[name])
    return REGISTRY[name]


@dataclass(frozen=True)
class Recipe:
    """A recipe with its options checked; `str()` gives the canonical text."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({inside})" if inside else self.name

    def build(self) -> Composition:
        """What runs at first, and always if neither its `next` nor its `watch` says otherwise."""
        return _entry(self.name).build(**self.options)


def recipe(text: str | Recipe) -> Recipe:
    """Parse and check a recipe string.

    Raises `ValueError` for an unknown name or key, with the nearest valid one, and for a value out of
    its range.

    >>> str(recipe("covap( interval = 4 )"))
    'covap(interval=4)'
    >>> recipe("covapp")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: unknown recipe 'covapp'; did you mean 'covap'? Known: acpsgd, ...
    """
    name, options = (text.name, text.options) if isinstance(text, Recipe) else _split(text)
    if name not in names():
        raise ValueError(f"unknown recipe {name!r}{_nearest(name, names())}")
    known = _entry(name).options
    for key in options:
        if key not in known:
            raise ValueError(f"recipe {name!r} has no option {key!r}{_nearest(key, known)}")
    parsed = Recipe(name, options)
    try:
        parsed.build()
    except TypeError as error:
        raise ValueError(f"recipe '{text}': an option has the wrong type ({error})") from error
    return parsed


def steady(text: str, role: str) -> Composition:
    """What a recipe always runs, for a `role` in which nothing may change.

    Raises `ValueError` for one that measures first, and for one that changes while it runs.

    >>> steady("auto", "policy")
    Traceback (most recent call last):
    ...
    ValueError: policy: 'auto' must measure before it can decide; give it fixed options
    """
    built = recipe(text).build()
    if built.next is not None:
        raise ValueError(f"{role}: {text!r} must measure before it can decide; give it fixed options")
    if built.watch is not None:
        raise ValueError(f"{role}: {text!r} changes while it runs; give it as the recipe itself")
    return built


_PARSING = threading.Lock()
# CPython's ast.parse is not safe between threads ("AST constructor recursion depth mismatch", seen on
# 3.11.7), and workers build policies while others parse.


def _split(text: str) -> tuple[str, dict[str, Any]]:
    malformed = ValueError(f"cannot read recipe {text!r}; write name or name(key=value, key=value)")
    try:
        with _PARSING:
            tree = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise malformed from None
    match tree:
        case ast.Name(id=name):
            return name, {}
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if _differ(keywords):
            return name, {keyword.arg or "**": _literal(keyword.value, text) for keyword in keywords}
    raise malformed


def _differ(keywords: list[ast.keyword]) -> bool:
    return len({keyword.arg for keyword in keywords}) == len(keywords)


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        # Bare words stand for strings, so that a shell needs no second pair of quotes.
        if isinstance(node, ast.Name):
            return node.id
        raise ValueError(f"recipe {text!r}: {ast.unparse(node)!r} is not a plain value") from None


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}"
