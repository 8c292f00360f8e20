"""The catalogue of errors in docs/troubleshooting.md has what the source raises, and nothing else.

They are compared by class and first words, so that the rest of a message can be said better in one place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.support.looped import looped
from tests.support.source import MODULES, ROOT, Module

OURS = {"GradwireError", "GradwireWarning", "PeerFailed", "RanksDisagree", "TransportError", "WireError"}
WITHIN = ("gradwire_lab", "gradwire.comm.threads")
"""A laboratory, and ranks that are threads of one process: no training meets their errors."""
FIRST_WORDS = 3
"""Of a row that has as many; with them no two rows of a class that mean different things begin alike."""


def template(node: ast.expr, constants: dict[str, str]) -> str:
    """A text as the source spells it, "…" for what is put in; "" for one that comes from elsewhere.

    >>> template(ast.parse('f"rank {rank} is" " late"', mode="eval").body, {})
    'rank … is late'
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = [each.value if isinstance(each, ast.Constant) else "…" for each in values]
            return "".join(map(str, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return "".join(template(each, constants) or "…" for each in (left, right))
        case ast.Name(id=name):
            return constants.get(name, "")
    return ""


def constants_of(module: Module) -> dict[str, str]:
    """The texts that are named in a module, or in a function of it."""
    return {
        name.id: template(node.value, {})
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }


def raised(module: Module) -> Iterator[tuple[str, str]]:
    """(class, template) of each error and warning of our own that the module makes."""
    constants = constants_of(module)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        named = {ast.unparse(each).rpartition(".")[2] for each in (node.func, *node.args[1:])}
        if kind := named & OURS:
            yield kind.pop(), template(node.args[0], constants)


def texts(module: Module) -> Iterator[str]:
    """All templates of a module, whatever they are for."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.expr) and (found := template(node, {})):
            yield found


@cache
def catalogue() -> list[tuple[str, str]]:
    """(class, beginning of the message) of every row; a row may have several beginnings."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    _, *tables = page.split("| message begins with | class |")
    rows = [line.split(" | ") for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    return [(kind, each) for said, kind, *_ in rows for each in re.findall("`([^`]+)`", said)]


def begins(text: str, said: str) -> bool:
    """Whether a message begins as a row says.

    >>> begins("rank … failed in its encode", "rank … failed to encode"), begins("a framework", "a frame ")
    (True, False)
    """
    words = said.split()[:FIRST_WORDS]
    return text.split()[: len(words)] == words


def unknown(module: Module) -> list[str]:
    """What the module raises that the catalogue lacks."""
    known = catalogue()
    return [
        f"{module.name}: {kind}: {text}"
        for kind, text in raised(module)
        if text and not any(kind in of and begins(text, said) for of, said in known)
    ]


def parsed(source: str) -> Module:
    """A module of the package that is in no file."""
    module = Module(ROOT / "src" / "gradwire" / "planted.py")
    vars(module)["tree"] = ast.parse(source)
    return module


def test_every_error_of_ours_is_in_the_catalogue() -> None:
    ours = [module for module in MODULES if not module.name.startswith(WITHIN)]
    assert [each for module in ours for each in unknown(module)] == []


@looped(
    "planted",
    [
        "raise WireError('never said before')",
        "raise errors.WireError(f'never said before {1}')",
        "raise WireError('never said ' + str(1))",
        "text = 'never said before'\nraise WireError(text)",
        "warnings.warn('never said before', GradwireWarning, stacklevel=2)",
        'raise PeerFailed(f"a frame\'s checksum is wrong: {1}")',  # known, of another class
    ],
)
def test_a_new_error_is_missed_in_the_catalogue(planted: str) -> None:
    assert len(unknown(parsed(planted))) == 1


@looped(
    "reworded", ["raise WireError('a frame\\'s checksum differs')", "raise WireError(f'a peer sent me {1}')"]
)
def test_a_known_error_may_go_on_otherwise(reworded: str) -> None:
    assert unknown(parsed(reworded)) == []


def test_the_catalogue_has_nothing_that_the_source_does_not_say() -> None:
    said = {text for module in MODULES for text in texts(module)}
    assert [each for _, each in catalogue() if not any(begins(text, each) for text in said)] == []


def test_all_classes_are_in_the_catalogue() -> None:
    words = {word for kind, _ in catalogue() for word in re.findall(r"\w+", kind)}
    assert OURS - words == set()
