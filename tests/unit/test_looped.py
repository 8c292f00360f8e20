"""The tests' own loop: every value is tried, and a failure says which one it was."""

from __future__ import annotations

import inspect

import pytest

from tests.support.looped import looped


def test_every_value_is_tried_with_what_pytest_hands_in() -> None:
    seen = []

    @looped("number", [1, 2, 3])
    @looped(("left", "right"), [("a", "b"), ("c", "d")])
    def test(number: int, left: str, right: str, other: str) -> None:
        seen.append((number, left, right, other))

    assert list(inspect.signature(test).parameters) == ["other"]
    test(other="x")
    assert seen == [(n, *pair, "x") for n in (1, 2, 3) for pair in (("a", "b"), ("c", "d"))]


def test_a_failure_names_its_value() -> None:
    @looped("number", [1, 2, 3])
    def test(number: int) -> None:
        assert number != 2

    with pytest.raises(AssertionError) as raised:
        test()
    assert raised.value.__notes__ == ["with {'number': 2}"]


def test_nothing_to_try_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="no number to try"):
        looped("number", [])


@pytest.mark.parametrize("outer", [1, 2])
@looped("inner", [3, 4])
@pytest.mark.parametrize("marked", [5, 6])
def test_marks_on_both_sides_count(outer: int, inner: int, marked: int) -> None:
    assert (outer, marked) in {(1, 5), (1, 6), (2, 5), (2, 6)}
    assert inner in (3, 4)
