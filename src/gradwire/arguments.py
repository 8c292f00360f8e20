"""Options of recipes and arguments of public calls, checked by the annotations of the function they are for.

So neither recipes nor calls ask for types, for finite numbers or for absurd sizes themselves.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    MutableSet,
    Sequence,
    Set,
)
from functools import wraps
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest whole number: kernels compute with 64 bits. Where fewer make sense, as in an interval of steps,
the function refuses the others itself."""

LONGEST_S = 1e6
"""Longest time to wait for something: more than eleven days."""

_SEVERAL = (list, tuple, set, frozenset, Sequence, MutableSequence, Collection, Iterable, Set, MutableSet)
"""Annotations of what has several values."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Let `function` refuse, by name, an argument that does not fit its annotation: it raises `ValueError`.

    Numbers and arrays of NumPy's and torch's arrive as Python's, and what can be read once as a list. An
    infinite number fits `float`: the function knows whether it has a meaning.

    >>> @checked
    ... def sent(workers: int, rates: Iterable[float] = ()) -> list[object]:
    ...     return [workers, rates]
    >>> sent(4, rates=(rate / 2 for rate in (1, 3)))
    [4, [0.5, 1.5]]
    >>> sent("4")
    Traceback (most recent call last):
    ...
    ValueError: workers='4' is not a whole number
    """
    signature, kinds = inspect.signature(function), _kinds(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the function
        given = bound.arguments = {key: as_python(value) for key, value in bound.arguments.items()}
        finite = {key: value for key, value in given.items() if not _is_endless(value, kinds.get(key))}
        if problem := problem_of(function, finite):
            raise ValueError(problem)
        return function(*bound.args, **bound.kwargs)

    return called


def _is_endless(value: Any, kind: Any) -> bool:
    return isinstance(value, float) and math.isinf(value) and float in (kind, *get_args(kind))


def as_python(value: Any) -> Any:
    """Numbers and arrays of NumPy's and torch's as Python's, and what can be read once as a list; anything
    else as it is.
    """
    if isinstance(value, Iterator):
        value = list(value)
    for kind in (list, tuple, set, frozenset):
        if type(value) is kind:
            return kind(as_python(each) for each in value)
    listed = getattr(value, "tolist", None)
    return value if listed is None or isinstance(value, type) else listed()


def is_time(seconds: object, longest_s: float = LONGEST_S) -> bool:
    """True for a number of seconds above 0, of `longest_s` at most: by default, a time to wait for something.

    >>> is_time(0.5), is_time(0), is_time(float("inf")), is_time("1")
    (True, False, False, False)
    """
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= longest_s


def problem_of(build: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """The first of `options` that does not fit its annotation in `build`, and why; empty if all fit.

    Defaults fit, because texts of compositions and checkpoints name them. Annotations that are not known
    here, such as classes, fit every value.

    >>> def build(rank: int = 1, edges: Sequence[float] | None = None) -> None: ...
    >>> problem_of(build, {"rank": 2, "edges": (0.25, 0.5)})
    ''
    >>> problem_of(build, {"rank": 2**63})
    'rank=9223372036854775808 is outside -2^63 … 2^63 - 1'
    >>> problem_of(build, {"edges": [0.5, "all"]})
    "edges=[0.5, 'all'], of which 'all' is not a number"
    """
    kinds, parameters = _kinds(build), inspect.signature(build).parameters
    given = {key: value for key, value in options.items() if repr(value) != repr(parameters[key].default)}
    problems = ((key, _problem(value, kinds.get(key))) for key, value in given.items())
    return next((f"{key}={problem}" for key, problem in problems if problem), "")


def _kinds(build: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of `build` as types. One that is no type here, as a name for type checkers only or
    words on an option, stays what it is.
    """
    names = vars(collections.abc) | inspect.unwrap(build).__globals__
    return {key: _kind(annotation, names) for key, annotation in inspect.get_annotations(build).items()}


def _kind(annotation: Any, names: dict[str, Any]) -> Any:
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), names)["it"]
    except Exception:  # what users write is evaluated
        return annotation


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
    if (origin or kind) in (dict, Mapping):
        return _of_mapping(value, inner)
    if (origin or kind) in _SEVERAL:
        return _of_several(value, origin or kind, inner)
    if origin is Callable:
        return "" if callable(value) else " is not a function"
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


def _of_mapping(value: Any, inner: Sequence[Any]) -> str:
    if not isinstance(value, Mapping):
        return " is not a mapping"
    return (_of_all(value, inner[0]) or _of_all(value.values(), inner[1])) if inner else ""


def _of_several(value: Any, holder: Any, inner: Sequence[Any]) -> str:
    if isinstance(value, str | bytes):  # which would be read as letters
        return f" is not a sequence; a single one is written [{value!r}]"
    if not isinstance(value, (tuple, list, holder)):
        return " is not a sequence"
    return _of_all(value, inner[0]) if inner[1:] in ((...,), ()) and inner else ""


def _of_all(values: Iterable[Any], kind: Any) -> str:
    problem = next(filter(None, (_problem(value, kind) for value in values)), "")
    return problem and f", of which {problem}"


def _of_whole(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):  # True is an int, and equals 1 in every cache
        return " is not a whole number"
    return "" if -LARGEST - 1 <= value <= LARGEST else " is outside -2^63 … 2^63 - 1"


def _of_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return " is not a number"
    return "" if abs(value) <= sys.float_info.max else " is not finite"
