"""Each fault of docs/reliability.md has an error that `tests.faults.teeth` plants; the page has them all."""

from __future__ import annotations

import re

from tests.faults.teeth import CHANGES
from tests.support.source import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TESTED, _, PLANTED = PAGE.partition("\n## Do the tests notice?\n")
FAULTS = {int(number): covers for number, covers in re.findall(r"(?m)^\| (\d+) \|[^|]+\|([^|]+)\|", TESTED)}
"""What covers a fault, by its number."""


def test_every_fault_has_a_planted_error() -> None:
    assert list(FAULTS) == list(range(1, 26))
    assert FAULTS.keys() - {change.fault for change in CHANGES} == set()


def test_what_must_fail_is_among_what_covers_the_fault() -> None:
    def named(fault: int, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return any(f"`{each}`" in FAULTS[fault] for each in (path, folder, name))

    assert [each.row for each in CHANGES if not named(each.fault, each.test.partition("::")[0])] == []


def test_what_is_planted_has_its_place_and_its_test() -> None:
    for change in CHANGES:
        path, _, name = change.test.partition("::")
        assert (ROOT / change.path).read_text(encoding="utf-8").count(change.old) == 1, change.what
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), change.test


def test_the_page_has_all_of_them_and_no_others() -> None:
    _, _, table = PLANTED.partition("| # | made wrong | test that fails |\n|---|---|---|\n")
    assert table.split("\n\n")[0].splitlines() == [change.row for change in CHANGES]
