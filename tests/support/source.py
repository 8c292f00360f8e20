"""The source tree as the house rules see it: parsed, not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


@dataclass(frozen=True)
class Module:
    """One file of the packages."""

    path: Path

    @property
    def name(self) -> str:
        """Dotted, as it is imported."""
        parts = self.path.relative_to(SRC).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def __str__(self) -> str:
        return self.name


PACKAGES = ("gradwire", "gradwire_lab")
MODULES = tuple(Module(path) for package in PACKAGES for path in sorted((SRC / package).rglob("*.py")))
_NAMES = {module.name for module in MODULES}


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in the file, functions included.

    `from a import b` is a.b where that is a module, else a.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                ours = inner.split(".")[0] in PACKAGES
                yield node.lineno, inner if not ours or inner in _NAMES else str(node.module)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, method and nested function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
