"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast

from tests.support.source import MODULES, ROOT, functions

LONGEST_MODULE, LONGEST_FUNCTION, LONGEST_EXAMPLE = 450, 60, 59


def test_modules() -> None:
    lines = {module.path: len(module.path.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    assert {path: count for path, count in lines.items() if count > LONGEST_MODULE} == {}


def test_functions() -> None:
    lines = {
        f"{module.path}:{function.lineno}: {function.name}": _lines(function)
        for module in MODULES
        for function in functions(module.tree)
    }
    assert {where: count for where, count in lines.items() if count > LONGEST_FUNCTION} == {}


def test_examples() -> None:
    files = [*(ROOT / "examples").glob("*.py")]
    assert files
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > LONGEST_EXAMPLE} == {}


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long it is beside its docstring, which a public function needs."""
    total = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None or first.end_lineno is None:
        return total
    return total - (first.end_lineno - first.lineno + 1)
