"""Tiers of tests: which files each of them leaves out unread, and which cases of a parameter are marked."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems, pytest_ignore_collect
from tests.support.looped import looped
from tests.support.tiers import in_make_test, rest


@looped(
    ("text", "in_test", "in_rest"),
    [
        ("def test_a(): pass\n", True, False),
        ("pytestmark = pytest.mark.rest\n\ndef test_a(): pass\n", False, True),
        ("pytestmark = [pytest.mark.process, pytest.mark.rest]\n", False, True),
        ("@pytest.mark.rest\ndef test_a(): pass\n\ndef test_b(): pass\n", True, True),
        ("@pytest.mark.parametrize('a', rest(range(3), but=[1]))\ndef test_a(a): pass\n", True, True),
        ("restore = 1\n", True, False),
    ],
)
def test_a_file_is_imported_by_the_tiers_that_run_a_part_of_it(
    tmp_path: Path, text: str, in_test: bool, in_rest: bool
) -> None:
    path = tmp_path / "test_file.py"
    path.write_text(text, encoding="utf-8")

    def is_imported(words: str) -> bool:
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=words))
        return not pytest_ignore_collect(path, config)

    found = [is_imported(words) for words in ("not rest", "rest", "", "process and not rest")]
    assert found == [in_test, in_rest, True, True]


@looped(("depth", "names"), [("few", ["short"]), ("full", ["short", "long"])])
def test_tests_that_take_minutes_are_left_out_where_not_all_rows_are_tried(
    monkeypatch: pytest.MonkeyPatch, depth: str, names: list[str]
) -> None:
    monkeypatch.setattr("tests.conftest.FULL", depth == "full")
    gone: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    marks = {"short": {"rest"}, "long": {"rest", "full"}}
    every: list[Any] = [
        SimpleNamespace(name=name, get_closest_marker=marks[name].__contains__) for name in marks
    ]
    items = every.copy()
    pytest_collection_modifyitems(config, items)
    assert [each.name for each in items] == names
    assert [*items, *gone] == every


def test_a_part_of_a_parameter_s_values_is_marked() -> None:
    one, two, three = rest(["a", "b", "c"], but=("b",))
    assert two == "b"
    for case, value in ((one, "a"), (three, "c")):
        assert case.values == (value,)
        assert [mark.name for mark in case.marks] == ["rest"]
    with pytest.raises(AssertionError, match=r"no such values: \['d'\]"):
        rest(["a"], but=["d"])


def _each(**_: Any) -> None:
    """A test."""


def _marked(*marks: pytest.MarkDecorator) -> Any:
    test = types.FunctionType(_each.__code__, {})
    for mark in marks:
        test = mark(test)
    return test


CASES = pytest.mark.parametrize("a", rest([1, 2, 3], but=[2, 3]))
NONE = pytest.mark.parametrize("a", rest([1], but=[]))
PAIRS = pytest.mark.parametrize(("b", "c"), [(4, 5), pytest.param(6, 7, marks=pytest.mark.rest)])


@looped(
    ("module", "marks", "found"),
    [
        ([], [], [{}]),
        ([pytest.mark.process], [CASES, PAIRS], [{"a": 2, "b": 4, "c": 5}, {"a": 3, "b": 4, "c": 5}]),
        (pytest.mark.rest, [], []),
        ([pytest.mark.process, pytest.mark.rest], [], []),
        ([], [pytest.mark.rest, CASES], []),
        ([], [NONE, PAIRS], []),
        ([], [pytest.mark.full], []),
        ([pytest.mark.skipif(False, reason="")], [CASES], []),  # it may be skipped elsewhere
    ],
)
def test_marks_say_which_cases_make_test_runs(
    module: Any, marks: list[pytest.MarkDecorator], found: list[dict[str, int]]
) -> None:
    def by_name(case: Mapping[str, int]) -> list[tuple[str, int]]:
        return sorted(case.items())

    cases = in_make_test(SimpleNamespace(pytestmark=module), _marked(*marks))  # type: ignore[arg-type]
    assert sorted(map(by_name, cases)) == sorted(map(by_name, found))


def test_rows_of_a_loop_are_cases() -> None:
    def in_turn(a: int) -> None:
        """A test."""

    here = SimpleNamespace()
    assert list(in_make_test(here, looped("a", [1, 2])(in_turn))) == [{"a": 1}, {"a": 2}]  # type: ignore[arg-type]
    grouped = looped("a", [1, 2, 3], by=lambda each: "odd" if each % 2 else "even")(in_turn)
    assert [each["a"] for each in in_make_test(here, grouped)] == [1, 3, 2]  # type: ignore[arg-type]
    assert list(in_make_test(here, pytest.mark.rest(grouped))) == []  # type: ignore[arg-type]
