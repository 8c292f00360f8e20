"""One statement of the package made another, by the name of its function and by how it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import indent

from tests.support.source import MODULES, Module

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def definitions() -> tuple[tuple[str, Module, Definition], ...]:
    """Every class and function of the package, as `module:Class.method`, its file and its syntax."""

    def within(module: Module, node: ast.AST, prefix: str) -> Iterator[tuple[str, Module, Definition]]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, Definition):
                yield f"{prefix}{each.name}", module, each
                yield from within(module, each, f"{prefix}{each.name}.")
            else:
                yield from within(module, each, prefix)

    return tuple(found for module in MODULES for found in within(module, module.tree, f"{module.name}:"))


def planted(where: str, old: str, new: str) -> tuple[Path, str]:
    """A file of the package, and its text with one statement made another.

    `where` is the function, or the end of `module:Class.method`; the file does not matter. `old` is the
    statement as `ast.unparse` spells it, of a compound one the first line, with "…" for any part. In `new`
    each "…" stands for what it stood for in `old`. Raises `ValueError` where not just one statement in the
    package reads so.
    """
    pattern = re.compile("( *)" + "(.*)".join(map(re.escape, old.split("…"))))
    found = [
        (module, node, number, match)
        for name, module, node in definitions()
        if name.endswith((f".{where}", f":{where}"))
        for number, line in enumerate(ast.unparse(node).splitlines())
        if (match := pattern.fullmatch(line))
    ]
    if len(found) != 1:
        raise ValueError(f"mend the row: {where} has {old!r} in {[str(module) for module, *_ in found]}")
    ((module, node, number, match),) = found
    margin, *parts = match.groups()
    for part in parts:
        new = new.replace("…", part, 1)
    lines = ast.unparse(node).splitlines()
    lines[number] = indent(new, margin)
    text = module.path.read_text(encoding="utf-8").splitlines()
    start = min(each.lineno for each in (node, *node.decorator_list)) - 1
    text[start : node.end_lineno] = indent("\n".join(lines), " " * node.col_offset).splitlines()
    return module.path, "\n".join(text) + "\n"
