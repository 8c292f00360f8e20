"""The tests' own loop: every value is tried, and a failure says which one it was."""

from __future__ import annotations

import inspect

import pytest

from tests.support import depth
from tests.support.looped import RowsFail, looped


def test_every_value_is_tried_with_what_pytest_hands_in() -> None:
    seen = []

    @looped("number", [1, 2, 3])
    @looped(("left", "right"), [("a", "b"), ("c", "d")])
    def test(number: int, left: str, right: str, other: str) -> None:
        seen.append((number, left, right, other))

    assert list(inspect.signature(test).parameters) == ["other"]
    test(other="x")
    assert seen == [(n, *pair, "x") for n in (1, 2, 3) for pair in (("a", "b"), ("c", "d"))]


def test_every_row_that_fails_is_named_with_its_reason() -> None:
    @looped("number", [1, 2, 3])
    @looped("half", [0, 1])
    def test(number: int, half: int) -> None:
        if number == 3:
            with pytest.raises(ValueError, match="three"):
                pass
        if half:
            raise ValueError(f"half of {number}\nand more")

    with pytest.raises(RowsFail) as raised:
        test()
    first, *rows = str(raised.value).splitlines()
    assert first == "4 of 6 rows fail"
    assert [row.split(": ")[:2] for row in rows] == [
        ["number=1, half=1", "ValueError"],
        ["number=2, half=1", "ValueError"],
        ["number=3, half=0", "Failed"],
        ["number=3, half=1", "Failed"],
    ]
    assert rows[1].endswith("ValueError: half of 2")
    assert str(raised.value.__cause__) == "half of 1\nand more"


class Kept:
    """Of which a row must not leave anything to the next."""

    value = 0


def test_every_value_has_a_monkeypatch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @looped("number", [1, 2])
    def test(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        seen.append(Kept.value)
        monkeypatch.setattr(Kept, "value", number)

    test(monkeypatch=monkeypatch)
    assert (seen, Kept.value) == ([0, 0], 0)


@looped("number", range(12), by=lambda number: "even" if number % 2 == 0 else "odd")
def test_groups_are_tests_of_their_own(number: int, request: pytest.FixtureRequest) -> None:
    assert request.node.name.endswith("[odd]" if number % 2 else "[even]")


@pytest.mark.parametrize(("is_few", "tried"), [(True, 2), (False, 12)])
def test_where_few_rows_are_tried_so_many_are_drawn_of_each_group(
    is_few: bool, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "FEW", is_few)
    seen = []

    def test(number: int) -> None:
        seen.append(number)

    draws = set()
    for seed in (*range(20), *range(20)):
        monkeypatch.setenv("GRADWIRE_LAWS_SEED", str(seed))
        seen.clear()
        looped("number", range(12), few=2)(test)()
        assert len(seen) == tried
        assert seen == sorted(set(seen))
        draws.add((seed, *seen))
    assert len(draws) == 20, "the seed alone decides"
    assert (len({draw[1:] for draw in draws}) > 1) is is_few


def test_nothing_to_try_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="no number to try"):
        looped("number", [])


@pytest.mark.parametrize("outer", [1, 2])
@looped("inner", [3, 4])
@pytest.mark.parametrize("marked", [5, 6])
def test_marks_on_both_sides_count(outer: int, inner: int, marked: int) -> None:
    assert (outer, marked) in {(1, 5), (1, 6), (2, 5), (2, 6)}
    assert inner in (3, 4)
