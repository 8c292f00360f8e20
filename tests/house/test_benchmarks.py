"""Benchmarks, which no test runs: their imports exist, and each stays for a reason."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.support.source import PACKAGES, ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.rest
def test_what_benchmarks_import_of_ours_exists() -> None:
    # A name that moves would be missed there until the next measurement.
    missing = []
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                module = import_module(str(node.module))
                missing += [
                    f"{script.name}: {node.module}.{each.name}"
                    for each in node.names
                    if not hasattr(module, each.name) and not find_spec(f"{node.module}.{each.name}")
                ]
    assert missing == []


def test_the_table_says_what_rests_on_each_script() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(row for row in rows if "/" not in row) == [script.name for script in SCRIPTS]
