"""The public surface says what it does, documents agree with the source, and examples in the source run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol

import pytest

from gradwire import recipes
from gradwire.laws import Laws
from tests.support.source import MODULES, ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


def exported(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """(name, object) of its classes, their methods, and functions: those of `__all__`, or that it defines."""
    own = [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, found
        if inspect.isclass(found):
            yield from (
                (f"{name}.{inner}", getattr(found, inner))
                for inner, method in vars(found).items()
                if isinstance(method, FunctionType | property)
                and not inner.startswith("_")
                and getattr(method, "__name__", inner) == inner  # not a default of a field
            )


@pytest.mark.rest
def test_what_is_exported_says_what_it_does() -> None:
    packages = [each.name for each in MODULES if each.path.name == "__init__.py"]
    files = [each.name for each in MODULES if re.match(r"gradwire\.(integrations|kernels)\.\w+$", each.name)]
    modules = [importlib.import_module(name) for name in dict.fromkeys(packages + files)]
    found = {f"{module.__name__}.{name}": each for module in modules for name, each in exported(module)}
    assert {"gradwire.Wire.save", "gradwire.comm.Comm", "gradwire.kernels.topk.topk_indices"} <= found.keys()
    # What a method does that implements a protocol is said there.
    protocols = [each for each in found.values() if inspect.isclass(each) and Protocol in each.__bases__]
    agreed = {name for protocol in protocols for name, each in vars(protocol).items() if inspect.getdoc(each)}
    mute = [name for name, each in found.items() if not inspect.getdoc(each)]
    assert [name for name in mute if name.rpartition(".")[2] not in agreed] == []


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    indirect = re.compile(r'^ *r?"""(The same|What|That of)\b', re.MULTILINE)
    assert indirect.search('    """What it is."""')
    assert not [str(module.path) for module in MODULES if indirect.search(module.path.read_text())]


@pytest.mark.rest
@pytest.mark.timeout(300)  # on an empty cache, it compiles all kernels
def test_examples_run() -> None:
    failed = []
    for module in MODULES:
        if ">>>" in module.path.read_text(encoding="utf-8"):
            # A module that cannot be imported fails here: nothing is skipped.
            results = doctest.testmod(importlib.import_module(module.name))
            # One with only examples that doctest skips should have a block (::) instead.
            failed += [] if results.attempted and not results.failed else [module.name]
    assert failed == []


def test_the_page_of_all_recipes_has_a_line_for_each() -> None:
    guide = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in recipes.names() if f"\n| `{name}` | " not in guide] == []


def test_the_page_on_adding_a_method_quotes_what_is_there() -> None:
    page = (ROOT / "docs" / "engineering" / "adding-a-method.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w/.-]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert len(quoted) == page.count("```") / 2
    assert [path for path, block in quoted if block not in (ROOT / path).read_text(encoding="utf-8")] == []


def test_the_page_on_laws_has_a_row_with_a_test_for_every_field() -> None:
    page = (ROOT / "docs" / "engineering" / "laws.md").read_text(encoding="utf-8")
    rows = {
        row[1]: row[3]
        for row in re.findall(r"^\| ([^|]*) \| `(\w+)` \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    }
    assert [field.name for field in fields(Laws) if "test_" not in rows.get(field.name, "")] == []


def test_links_between_documents_lead_somewhere() -> None:
    assert [f"{page}: {link}" for page in PAGES for link in broken(page)] == []


def broken(page: Path) -> Iterator[str]:
    """Links to a file or a heading that is not there."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^):]+)\)", text):
        path, _, heading = link.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (heading and heading not in anchors(there)):
            yield link


def anchors(page: Path) -> set[str]:
    """What GitHub and the site call headings of a page: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, here\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#a-heading-here) [b](gone.md) [c](there.md#gone) [d](#gone) [e](https://x.y)"
    )
    assert list(broken(page)) == ["gone.md", "there.md#gone", "#gone"]
