"""Tiers of tests: which files each of them leaves out unread, and which cases of a parameter are marked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_ignore_collect
from tests.support.looped import looped
from tests.support.tiers import rest
from tests.teeth.recording import Item, tier_of


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


def test_a_part_of_a_parameter_s_values_is_marked() -> None:
    one, two, three = rest(["a", "b", "c"], but=("b",))
    assert two == "b"
    for case, value in ((one, "a"), (three, "c")):
        assert case.values == (value,)
        assert [mark.name for mark in case.marks] == ["rest"]
    with pytest.raises(AssertionError, match=r"no such values: \['d'\]"):
        rest(["a"], but=["d"])


@looped(("marks", "tier"), [((), "test"), (("process",), "test"), (("process", "rest"), "all")])
def test_the_gate_of_planted_faults_knows_a_test_s_tier(marks: tuple[str, ...], tier: str) -> None:
    assert tier_of(Item("a.py::b", frozenset(marks), 1.0, frozenset())) == tier
