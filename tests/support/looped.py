"""A parameter that varies in a loop inside one test.

Where a test takes a millisecond, pytest spends several on collecting, distributing and reporting it, and that
thousands of times.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.depth import drawn

Test = Callable[..., None]
Row = Mapping[str, Any]


class RowsFail(AssertionError):
    """Some rows of a loop fail. Says which ones and why, and goes on from the first of them."""

    def __init__(self, tried: int, failures: list[tuple[Row, BaseException]]) -> None:
        self.tried, self.failures = tried, failures
        said = [f"{_named(row)}: {_said(error)}" for row, error in failures]
        super().__init__("\n".join([f"{len(failures)} of {tried} rows fail", *said]))


def looped(
    names: str | tuple[str, ...],
    values: Iterable[Any],
    by: Callable[[Any], str] | None = None,
    few: int | None = None,
) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but one test tries every value, and then names those that fail.

    With `by` there is one test for each group of values of which that says the same, and its name is the
    group's. Where few rows are tried (`tests/support/depth.py`), `few` of each group are. Each value has a
    `monkeypatch` of its own. The test has its `rows` by group.
    """
    single = isinstance(names, str)
    groups: dict[str, list[Row]] = {}
    for value in values:
        row = {names: value} if single else dict(zip(names, value, strict=True))
        groups.setdefault(by(value) if by else "", []).append(row)
    assert groups, f"no {names} to try"

    def decorate(test: Test) -> Test:
        tried = groups
        if few is not None:
            tried = {each: drawn(rows, few, f"{test.__name__} {each}") for each, rows in groups.items()}

        @functools.wraps(test)
        def whole(**others: Any) -> None:
            try_all(test, tried[""], others)

        @functools.wraps(test)
        def grouped(group: str, **others: Any) -> None:
            try_all(test, tried[group], others)

        whole.rows = grouped.rows = tried  # type: ignore[attr-defined]
        left, first = inspect.signature(test), next(iter(groups.values()))[0]
        kept = [each for each in left.parameters.values() if each.name not in first]
        if by is None:
            whole.__signature__ = left.replace(parameters=kept)  # type: ignore[attr-defined]
            return whole
        kept.append(inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY))
        grouped.__signature__ = left.replace(parameters=kept)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("group", groups)(grouped)

    return decorate


def try_all(test: Test, rows: Iterable[Row], others: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Call `test` with every row and `others`; raises `RowsFail`."""
    tried, failures = 0, list[tuple[Row, BaseException]]()
    for row in rows:
        tried += 1
        try:
            with pytest.MonkeyPatch.context() as own:
                test(**row, **{name: own if name == "monkeypatch" else each for name, each in others.items()})
        except RowsFail as inner:
            tried += inner.tried - 1
            failures += [({**row, **within}, error) for within, error in inner.failures]
        except (Exception, pytest.fail.Exception) as error:
            failures.append((row, error))
    if failures:
        raise RowsFail(tried, failures) from failures[0][1]


def _named(row: Row) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in row.items())


def _said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
