"""Tiers: `make test` runs a part of the tests, and `make test-all` the rest, marked `pytest.mark.rest`.

Tests marked `pytest.mark.full` run in neither, but in `make test-full`: `tests/conftest.py` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import pytest


def rest(values: Iterable[Any], but: Collection[Any]) -> list[Any]:
    """Values of a parameter, of which `make test` runs only those in `but`."""
    every = list(values)
    unknown = [each for each in but if each not in every]
    assert not unknown, f"no such values: {unknown}"
    return [each if each in but else pytest.param(each, marks=pytest.mark.rest) for each in every]


def cases(rows: Iterable[tuple[Any, ...]], but: Collection[tuple[Any, ...]]) -> list[Any]:
    """The same for rows of several parameters, each of which is named by its values."""
    every = list(rows)
    unknown = [each for each in but if each not in every]
    assert not unknown, f"no such rows: {unknown}"
    names = [", ".join(getattr(value, "__name__", str(value)) for value in row) for row in every]
    marks = [() if row in but else pytest.mark.rest for row in every]
    return [
        pytest.param(*row, id=name, marks=mark) for row, name, mark in zip(every, names, marks, strict=True)
    ]


def in_make_test(module: ModuleType, test: Callable[..., Any]) -> Iterator[Mapping[str, Any]]:
    """Parameters of each case of a test that `make test` runs; of a test that loops, those of each row.

    There are none if the test, its module, or all values of one of its parameters are marked to run elsewhere
    or to be skipped, even if only on some machines.
    """
    whole = getattr(module, "pytestmark", [])
    marks = [*(whole if isinstance(whole, list) else [whole]), *getattr(test, "pytestmark", [])]
    if any(mark.name in _ELSEWHERE for mark in marks):
        return
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = getattr(test, "rows", {"": [{}]})
    for values in product(*(_unmarked(*mark.args) for mark in marks if mark.name == "parametrize")):
        case = {name: value for each in values for name, value in each.items()}
        for row in rows.get("") or rows[case["group"]]:
            yield {**case, **row}


_Marked = type(pytest.param())
_ELSEWHERE = {"rest", "full", "skip", "skipif", "xfail"}


def _unmarked(names: str | Sequence[str], values: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for value in values:
        if isinstance(value, _Marked):
            if any(mark.name in _ELSEWHERE for mark in value.marks):
                continue
            value = value.values if not isinstance(names, str) else value.values[0]
        yield {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
