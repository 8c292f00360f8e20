"""One mention of a method taken out of gradwire's code, in this process, to see whether a test notices.

The source of the function that mentions it is compiled anew without it, and the function gets that code. So
the objects that exist have it too, and leaving the context puts the old code back.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import gradwire

ROOT = Path(gradwire.__file__).parent
Instead = Callable[[Any, str], Any]
"""Takes an object and the name of the attribute that it is not asked for; returns what stands for that."""
_INSTEAD = "__instead__"


@dataclass(frozen=True)
class Mention:
    """`text`, an attribute of something, that ends at a line and a column of the file at `path`."""

    path: str
    function: str
    text: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function} {self.text}"


def mentions(names: frozenset[str]) -> list[Mention]:
    """All attributes of these names in gradwire's functions."""
    found = []
    mentioned = re.compile(rf"\.({'|'.join(names)})\b")
    for path in sorted(ROOT.rglob("*.py")):
        if not mentioned.search(path.read_text("utf-8")):
            continue  # to parse everything takes seconds
        for function, node in _functions(_tree(path)):
            found.extend(
                Mention(
                    path.relative_to(ROOT).as_posix(),
                    function,
                    ast.unparse(each),
                    each.end_lineno or 0,
                    each.end_col_offset or 0,
                )
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute) and each.attr in names and not _is_text(each.value)
            )
    return found


@contextmanager
def without(mention: Mention, instead: Instead) -> Iterator[None]:
    """Within it, `instead` is asked for what is mentioned."""
    module = ".".join(["gradwire", *mention.path.removesuffix(".py").split("/")]).removesuffix(".__init__")
    function = _live(module, mention.function)
    path = ROOT / mention.path
    tree = ast.fix_missing_locations(_Without(mention).visit(ast.parse(path.read_text("utf-8"))))
    before = function.__code__
    function.__globals__[_INSTEAD] = instead
    function.__code__ = _code(compile(tree, path, "exec", dont_inherit=True), before)
    try:
        yield
    finally:
        function.__code__ = before
        del function.__globals__[_INSTEAD]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, with what is defined in them, by name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{inside}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _functions(node, inside)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr)


def _live(module: str, name: str) -> FunctionType:
    found: Any = import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType)
    return function


def _code(inside: CodeType, like: CodeType) -> CodeType:
    for each in inside.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == like.co_qualname:
                return each
            if like.co_qualname.startswith(f"{each.co_qualname}."):
                return _code(each, like)
    raise AssertionError(f"no function {like.co_qualname}")


class _Without(ast.NodeTransformer):
    def __init__(self, mention: Mention) -> None:
        self._at = mention.line, mention.column

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if (node.end_lineno, node.end_col_offset) != self._at:
            return node
        instead = ast.Name(_INSTEAD, ast.Load())
        return ast.copy_location(ast.Call(instead, [node.value, ast.Constant(node.attr)], []), node)
