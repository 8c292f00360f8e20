"""Values of options, checked by the annotations of the function that builds a recipe.

So no recipe asks for types, for finite numbers or for absurd sizes itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 10**12
"""The largest whole number that an option may have. Options count elements, steps or groups. No model has as
many elements, and kernels compute with 64 bits."""


def problem_of(build: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """The first of `options` that does not fit its annotation in `build`, and why; empty if all fit.

    Defaults fit, because texts of compositions and checkpoints name them. Annotations that no recipe of ours
    has fit every value.

    >>> def build(rank: int = 1, edges: Sequence[float] | None = None) -> None: ...
    >>> problem_of(build, {"rank": 2, "edges": (0.25, 0.5)})
    ''
    >>> problem_of(build, {"rank": 10**13})
    'rank=10000000000000 is outside -10^12 … 10^12'
    >>> problem_of(build, {"edges": [0.5, "all"]})
    "edges=[0.5, 'all'], of which 'all' is not a number"
    """
    kinds, parameters = _kinds(build), inspect.signature(build).parameters
    given = {key: value for key, value in options.items() if repr(value) != repr(parameters[key].default)}
    problems = ((key, _problem(value, kinds.get(key))) for key, value in given.items())
    return next((f"{key}={problem}" for key, problem in problems if problem), "")


def _kinds(build: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of `build` as types. If one is no type here, as those for type checkers only or words
    on an option, all but plain ones stay what they are.
    """
    try:
        return get_type_hints(build)
    except Exception:  # what users write is evaluated
        plain = {kind.__name__: kind for kind in (bool, int, float, str)}
        return {key: plain.get(str(kind), kind) for key, kind in inspect.get_annotations(build).items()}


def _problem(value: Any, kind: Any) -> str:
    """Why `value` does not fit `kind`, after the value itself; empty if it fits."""
    why = _why(value, kind)
    return why and f"{value!r}{why}"


def _why(value: Any, kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        reasons = [_why(value, each) for each in inner]
        return reasons[0] if all(reasons) else ""
    if origin is Literal:
        return "" if value in inner else f" is none of {', '.join(map(str, inner))}"
    if origin in (list, Sequence) or (origin is tuple and inner[1:] == (...,)):
        if not isinstance(value, tuple | list):
            return " is not a sequence"
        return _of_all(value, inner[0])
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return " is not a mapping"
        return _of_all(value, inner[0]) or _of_all(value.values(), inner[1])
    if kind is NoneType:
        return "" if value is None else " is not None"
    if kind is bool:
        return "" if value in (True, False) else " is neither True nor False"
    if kind is str:
        return "" if isinstance(value, str) else " is not a word"
    if kind is int:
        return _of_whole(value)
    if kind is float:
        return _of_number(value)
    return ""


def _of_all(values: Iterable[Any], kind: Any) -> str:
    problem = next(filter(None, (_problem(value, kind) for value in values)), "")
    return problem and f", of which {problem}"


def _of_whole(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):  # True is an int, and equals 1 in every cache
        return " is not a whole number"
    return "" if -LARGEST <= value <= LARGEST else " is outside -10^12 … 10^12"


def _of_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return " is not a number"
    return "" if abs(value) <= sys.float_info.max else " is not finite"
