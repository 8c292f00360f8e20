"""Each fault of docs/engineering/reliability.md has an error that `tests.faults.teeth` plants.

The page has them all.
"""

from __future__ import annotations

import ast
import builtins
import re

import pytest

from tests.faults.teeth import CHANGES, planted
from tests.support.source import ROOT

PAGE = (ROOT / "docs" / "engineering" / "reliability.md").read_text(encoding="utf-8")
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

    assert [each.row for each in CHANGES if not named(each.fault, each.path)] == []


def test_what_is_planted_has_its_place_and_its_test() -> None:
    for change in CHANGES:
        source, text = planted(change.where, change.old, change.new)
        before, after = ast.parse(source.read_text(encoding="utf-8")), ast.parse(text)
        assert change.old != change.new, change.what
        assert names(after) - names(before) <= set(dir(builtins)), change.what  # fails for what it says
        assert change.path


def names(tree: ast.AST) -> set[str]:
    """All names in a source: variables, attributes, imports."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                found.add(name)
    return found


@pytest.mark.parametrize(
    ("where", "old"),
    [
        ("ExchangeRunner.no_such_method", "except …:"),
        ("ExchangeRunner._start", "no such statement"),
        ("ExchangeRunner._start", "except …:"),  # two of them
        ("__init__", "self.…"),  # of many classes
    ],
)
def test_a_row_that_does_not_name_one_statement_is_refused(where: str, old: str) -> None:
    with pytest.raises(ValueError, match="mend the row"):
        planted(where, old, "pass")


def test_only_the_statement_changes() -> None:
    path, text = planted("ExchangeRunner._start", "except BaseException as …:", "except Exception as …:")
    before = ast.unparse(ast.parse(path.read_text(encoding="utf-8")))
    assert ast.unparse(ast.parse(text)) == before.replace("except BaseException as", "except Exception as", 1)


def test_the_page_has_all_of_them_and_no_others() -> None:
    _, _, table = PLANTED.partition("| # | made wrong | test that fails |\n|---|---|---|\n")
    assert table.split("\n\n")[0].splitlines() == [change.row for change in CHANGES]
