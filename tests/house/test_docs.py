"""Everything exported says what it does, and every example in the source runs."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire import recipes
from tests.support.source import MODULES, ROOT, Module

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def exported() -> Iterator[tuple[Module, Documented]]:
    """The classes, functions and methods in the `__all__` of a package or in `gradwire.integrations`.

    And the contracts of kernels, which consist of a docstring and of slow code.
    """
    named = set(named_by_packages())
    for module in MODULES:
        given = module.name.startswith("gradwire.integrations.")
        body = [
            each
            for each in module.tree.body
            if given or (module.name, name_of(each)) in named or is_contract(each)
        ]
        yield from ((module, node) for node in public(body))


def named_by_packages() -> Iterator[tuple[str, str]]:
    """(module, name) of what is in an `__all__`: of the package, and of the file from which it imports it."""
    for module in MODULES:
        names = {
            name
            for node in module.tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)
        }
        yield from ((module.name, name) for name in names)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                yield from ((str(node.module), each.name) for each in node.names if each.name in names)


def name_of(node: ast.stmt) -> str:
    """Of a class or function."""
    return node.name if isinstance(node, Documented) else ""


def is_contract(node: ast.stmt) -> bool:
    """Whether it says what each implementation of a kernel does."""
    marks = node.decorator_list if isinstance(node, Documented) else []
    return any(ast.unparse(mark).startswith("contract(") for mark in marks)


def public(body: list[ast.stmt]) -> Iterator[Documented]:
    """Classes and functions without an underscore, and such methods of these classes.

    Not the methods that a class takes over from a base or from a protocol, and not those that a protocol
    names without a body: their meaning is said there.
    """
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_") and not is_bare(node):
            yield node
            if isinstance(node, ast.ClassDef):
                methods = () if extends(node) else public(node.body)
                yield from (method for method in methods if method.name not in agreed() or is_protocol(node))


def is_bare(node: Documented) -> bool:
    """A signature and nothing else."""
    return len(node.body) == 1 and ast.unparse(node.body[0]) == "..."


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether it only says what others implement."""
    return "Protocol" in {ast.unparse(base).split("[")[0] for base in node.bases}


def extends(node: ast.ClassDef) -> bool:
    """Whether a base class may have documented the methods already."""
    return not {ast.unparse(base).split("[")[0] for base in node.bases} <= {
        "Protocol",
        "NamedTuple",
        "StrEnum",
    }


@functools.cache
def agreed() -> set[str]:
    """The methods of all protocols."""
    return {
        method.name
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and is_protocol(node)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }


def test_what_is_exported_has_a_docstring_and_so_has_each_file() -> None:
    found = {f"{module.name}.{node.name}" for module, node in exported()}
    assert {"gradwire.comm.base.Comm", "gradwire.integrations.rank_files.save"} <= found
    assert "gradwire.kernels.topk.topk_indices" in found
    assert {name for _, name in named_by_packages()} >= {"attach", "Wire", "Plan"}
    mute = [f"{module.path}: the module" for module in MODULES if not ast.get_docstring(module.tree)]
    mute += [
        f"{module.path}:{node.lineno}: {node.name}"
        for module, node in exported()
        if not ast.get_docstring(node)
    ]
    assert not mute


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    indirect = re.compile(r'^ *r?"""(The same|What|That of)\b', re.MULTILINE)
    assert indirect.search('    """What it is."""')
    assert not [str(module.path) for module in MODULES if indirect.search(module.path.read_text())]


def run_on(docstring: str) -> list[str]:
    """Literals with a letter directly behind them, which docutils does not take for literals."""
    _, *parts = docstring.replace("``", "`").split("`")
    pairs = zip(parts[::2], parts[1::2], strict=False)
    return [f"`{literal}`{behind}" for literal, behind in pairs if behind[:1].isalpha()]


def test_a_literal_with_a_letter_behind_it_is_found() -> None:
    assert run_on("as `DTensor`s over `ranks` of ``this``") == ["`DTensor`s over "]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_literals_end_before_a_letter(module: Module) -> None:
    documented = (ast.Module, Documented)
    found = [ast.get_docstring(node) for node in ast.walk(module.tree) if isinstance(node, documented)]
    assert [each for text in found if text for each in run_on(text)] == []


WITH_EXAMPLES = [module for module in MODULES if ">>>" in module.path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("module", WITH_EXAMPLES, ids=str)
def test_examples_run(module: Module) -> None:
    # A module that cannot be imported fails here: nothing is skipped.
    results = doctest.testmod(importlib.import_module(module.name))
    assert results.attempted > 0, "only examples that doctest skips: write them as a block (::) instead"
    assert results.failed == 0


def test_the_guide_to_choosing_has_a_line_for_every_recipe() -> None:
    guide = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert [name for name in recipes.names() if f"\n| `{name}` | " not in guide] == []


def test_the_page_on_adding_a_method_quotes_what_is_there() -> None:
    page = (ROOT / "docs" / "engineering" / "adding-a-method.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w/.-]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert len(quoted) == page.count("```") / 2
    assert [path for path, block in quoted if block not in (ROOT / path).read_text(encoding="utf-8")] == []


def test_a_reader_of_the_front_page_finds_the_line_and_the_papers_before_the_limits() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    first, _, _ = page.partition("\n## ")
    for system in ("COVAP", "ScaleCom", "MergeComp", "GComp", "AR-Topk", "(docs/papers.md)"):
        assert system in first
    for word in ("compresses the gradients", "error feedback", "Convergence", "Overhead"):
        assert word in first
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    wanted = ["What it gives", "Which line do I write", "Would it help me", "When not to use it"]
    assert [each for each in headings if each in wanted] == wanted


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([\w/.-]*\.md)?#([^)]+)\)", page.read_text(encoding="utf-8"))
    there = {path: anchors(page.parent / path if path else page) for path, _ in links}
    assert [f"{path}#{anchor}" for path, anchor in links if anchor not in there[path]] == []


def anchors(page: Path) -> set[str]:
    """What GitHub and the site call headings of a page: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
