"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import pytest

from tests.house.source import MODULES, Module, functions

LONGEST_MODULE, LONGEST_FUNCTION = 400, 60


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module(module: Module) -> None:
    lines = len(module.path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_MODULE, f"{module.path} has {lines} lines"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_functions(module: Module) -> None:
    for function in functions(module.tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        where = f"{module.path}:{function.lineno}"
        assert lines <= LONGEST_FUNCTION, f"{where}: {function.name} has {lines} lines"
