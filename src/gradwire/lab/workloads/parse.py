"""Workload strings: `name`, or `name(model, key=value, …)`."""

import ast
import difflib
from collections.abc import Iterable
from typing import Any


def parse(spec: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, positional and keyword arguments of `spec`; bare words and Python literals are values.

    >>> parse("emulated(vgg19, shrink=16)")
    ('emulated', ['vgg19'], {'shrink': 16})
    """
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            named = {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
            return tree.func.id, [_value(argument) for argument in tree.args], named
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"workload={spec!r} must look like `name` or `name(model, key=value)`")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known word if any is near, and the list of all of them."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(words)}"


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
