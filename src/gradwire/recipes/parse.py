"""Recipe strings: `name` or `name(key=value, …)` with Python literals as values.

The first option may go without its name: `topk(0.1)` is `topk(ratio=0.1)`.
"""

from __future__ import annotations

import ast
import difflib
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from gradwire.arguments import as_python, problem_of
from gradwire.recipes.base import REGISTRY, Composition, RecipeEntry
from gradwire.recipes.catalogue import MODULES


def names() -> tuple[str, ...]:
    """Names of all recipes, ours and those that users have registered.

    >>> "covap" in names()
    True
    """
    return tuple(sorted({*MODULES, *REGISTRY}))


def entries() -> tuple[RecipeEntry, ...]:
    """All recipes, with options and one-line summaries. Imports all recipe modules."""
    return tuple(_entry(name) for name in names())


def _entry(name: str) -> RecipeEntry:
    """The entry of a recipe; `name` is one of `names()`."""
    if name not in REGISTRY:
        import_module(MODULES[name])
    return REGISTRY[name]


@dataclass(frozen=True)
class Recipe:
    """A recipe with its options checked; `str()` gives the canonical text.

    `made` is a composition of the user's own that no registered recipe builds.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    made: Composition | None = None

    def __post_init__(self) -> None:
        if problem := problem_of(type(self).__init__, {"name": self.name, "options": self.options}):
            raise ValueError(f"Recipe: {problem}")

    def __str__(self) -> str:
        if self.made is not None:
            return self.made.text
        inside = ", ".join(f"{key}={as_python(value)!r}" for key, value in self.options.items())
        return f"{self.name}({inside})" if inside else self.name

    def build(self) -> Composition:
        """The first composition to run. It stays, unless its `next` or its `watch` replaces it."""
        return self.made if self.made is not None else _entry(self.name).build(**self.options)


def recipe(text: str | Recipe | Composition) -> Recipe:
    """Parse and check a recipe string, or take a composition as it is.

    Raises `ValueError` for an unknown name or key, with the nearest valid one, for a value out of its range,
    and for a composition without a text, or with the text of another.

    >>> str(recipe("covap( interval = 4 )"))
    'covap(interval=4)'
    >>> str(recipe("topk(0.1)"))
    'topk(ratio=0.1)'
    >>> recipe("covapp")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: unknown recipe 'covapp'; did you mean 'covap'? Known: acpsgd, ...
    """
    if isinstance(text, Composition):
        return _taken(text)
    if isinstance(text, Recipe) and text.made is not None:
        return text
    name, options = _split(str(text) if isinstance(text, Recipe) else text)  # texts are compared and saved
    if name not in names():
        raise ValueError(f"unknown recipe {name!r}{_nearest(name, names())}")
    known = _entry(name).options
    for key in options:
        if key not in known and key != FIRST:
            raise ValueError(f"recipe {name!r} has no option {key!r}{_nearest(key, known)}")
    if FIRST in options:
        options = _with_its_name(name, options, tuple(known))
    parsed = Recipe(name, options)
    try:
        parsed.build()  # first: a recipe knows the bounds of its options
    except ValueError as error:
        raise ValueError(f"recipe '{text}': {error}") from error
    except Exception as error:
        problem = problem_of(_entry(name).build, options)
        if not problem and not isinstance(error, TypeError | ArithmeticError):
            raise  # a fault of the function
        problem = problem or str(error)
        raise ValueError(f"recipe '{text}': an option has the wrong type: {problem}") from error
    if problem := problem_of(_entry(name).build, options):
        raise ValueError(f"recipe '{text}': {problem}")
    return parsed


def short(text: str) -> str:
    """A recipe's text in its shortest form: without options that have their defaults.

    It parses to the same composition. Texts of recipes that are not registered are returned unchanged.

    >>> short("int4(block=128, feedback=True, collective='all_gather')")
    "int4(collective='all_gather')"
    >>> short("int4(block=128, feedback=True, collective='all_reduce')")
    'int4'
    """
    try:
        parsed = recipe(text)
    except ValueError:  # a user's own, or words on what is measured
        return text
    # The text of the composition has one spelling of equal values, such as 1 and 1.0.
    default = {key: repr(value) for key, value in _entry(parsed.name).options.items()}
    kept = {key: value for key, value in parsed.options.items() if repr(value) != default[key]}
    return str(Recipe(parsed.name, kept))


def _taken(composition: Composition) -> Recipe:
    """The registered recipe with the text of `composition`, or a user's own one.

    Raises `ValueError` if the composition has no text, or that of a registered recipe that differs from it.
    """
    text = composition.text
    if not text:
        raise ValueError(
            "a composition needs a text, by which ranks compare it and a checkpoint finds it again: "
            "Composition(…, text='mine'); or make the function that builds it a recipe with "
            "gradwire.recipes.register"
        )
    name, _, _ = text.partition("(")
    if name not in names():
        return Recipe(name, made=composition)
    known = recipe(text)
    if known.build().exchange != composition.exchange:
        raise ValueError(f"{text!r} is the text of another recipe: give your composition a text of its own")
    return known


def _with_its_name(name: str, options: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Name the option that was given by position: it is the first of `known`. Returns all options by name.

    Raises `ValueError` if the recipe has no options, or if this one was also given by name.
    """
    if not known:
        raise ValueError(f"recipe {name!r} has no options: write {name}")
    if known[0] in options:
        raise ValueError(f"recipe {name!r} was given {known[0]!r} twice: by its place and by its name")
    return {known[0]: options[FIRST]} | {key: value for key, value in options.items() if key != FIRST}


def steady(text: str, role: str) -> Composition:
    """The composition of a fixed recipe. `role` says in errors for which purpose a recipe must not change.

    Raises `ValueError` for a recipe that measures first, or that changes while it runs.

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


FIRST = ""
"""The key of an option that was given without a name."""

_PARSING = threading.Lock()
# CPython's ast.parse is not safe between threads ("AST constructor recursion depth mismatch", seen on
# 3.11.7), and workers build policies while others parse.


def _split(text: str) -> tuple[str, dict[str, Any]]:
    malformed = ValueError(f"cannot read recipe {text!r}; write name or name(key=value, key=value)")
    try:
        with _PARSING:
            tree = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of brackets in brackets
        raise malformed from None
    match tree:
        case ast.Name(id=name):
            return name, {}
        case ast.Call(func=ast.Name(id=name), args=given, keywords=keywords) if _differ(keywords):
            if len(given) > 1:
                raise ValueError(f"recipe {text!r}: only the first option may go without its name")
            first = {name: _literal(value, text) for name, value in zip([FIRST], given, strict=False)}
            return name, first | {keyword.arg or "**": _literal(keyword.value, text) for keyword in keywords}
    raise malformed


def _differ(keywords: list[ast.keyword]) -> bool:
    return len({keyword.arg for keyword in keywords}) == len(keywords)


class _Numbers(ast.NodeTransformer):
    """Reads `inf` and `nan` as the numbers that Python writes so, also as a default of an option."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(_Numbers().visit(node))
    except (ValueError, TypeError, RecursionError):  # the last one of a minus before a minus, and so on
        # Bare words stand for strings, so that a shell needs no second pair of quotes.
        if isinstance(node, ast.Name):
            return node.id
        value = ast.get_source_segment(str(text).strip(), node)
        raise ValueError(f"recipe {text!r}: {value!r} is not a plain value") from None


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}"
