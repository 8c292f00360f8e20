"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

from tests.house.source import MODULES, functions

LONGEST_MODULE, LONGEST_FUNCTION = 400, 60


def test_modules() -> None:
    lines = {module.path: len(module.path.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    assert {path: count for path, count in lines.items() if count > LONGEST_MODULE} == {}


def test_functions() -> None:
    lines = {
        f"{module.path}:{function.lineno}: {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for module in MODULES
        for function in functions(module.tree)
    }
    assert {where: count for where, count in lines.items() if count > LONGEST_FUNCTION} == {}
