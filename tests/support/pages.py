"""The documents as their readers see them: blocks of code, by page.

A comment directly above a block says what the block alone does not:

- `<!-- given: sharded -->`: what it finds in place, by a name of `tests.process.scenes_pages`;
- `<!-- not run: REASON -->`: why no test runs it, and what does so instead.

What a page quotes from a file, whose name stands above the block, is run as that file is.

The site's reference shows docstrings. Their literal blocks, which doctest passes over, are blocks as well.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.source import MODULES, ROOT, Module

PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>given|not run): (?P<said>[^>]*?) -->\n)?"
    r"(?:`(?P<quoted>[\w/.-]+)`:\n\n)?"
    r"(?P<fence> *```+)(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_LITERAL = re.compile(r"^( *)\S.*::\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)
_NOT_RUN = {
    "gradwire._api.moving": "needs other members; tests/faults/scenes_members.py makes these calls",
    "gradwire._api.stored": "needs a store; tests/process/test_store.py makes these calls",
    "gradwire.members.bucket.meet": "needs a bucket; examples/three_sites.py has these lines",
    "gradwire.members.lighthouse": "needs torchft and a lighthouse; examples/come_and_go.py has these lines",
    "gradwire.members.standing": "tests/process/test_members.py has these lines",
    "gradwire.integrations.accelerate": "needs Accelerate; examples/with_accelerate.py has these lines",
    "gradwire.integrations.lightning": "needs Lightning; examples/with_fabric.py, examples/with_lightning.py",
    "gradwire.integrations.safetensors": "needs safetensors; tests/unit/integrations/test_safetensors.py",
    "gradwire.integrations.transformers": "needs transformers; examples/with_trainer.py has these lines",
    "gradwire_lab.emulate.network": "needs namespaces; tests/process/net_scene.py has more",
}
"""Modules whose literal blocks no test runs, and why."""
_OF_ROUNDS = ("gradwire._api.outer", "gradwire._api.rounds")


@dataclass(frozen=True)
class Block:
    """A block of code on a page or in a docstring; `line` is the one above its text."""

    page: Path
    line: int
    language: str
    text: str
    given: str = ""
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of all pages and docstrings, or those in certain languages."""
    return [block for block in _every() if not languages or block.language in languages]


@cache
def _every() -> tuple[Block, ...]:
    of_pages = [block for page in PAGES for block in blocks_of(page)]
    return (*of_pages, *(block for module in MODULES for block in literals_of(module)))


def blocks_of(page: Path) -> list[Block]:
    """The blocks of one page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        said = {"given" if block["mark"] == "given" else "not_run": block["said"] or ""}
        if block["quoted"]:
            said = {"not_run": f"quoted from {block['quoted']}, which tests/house/test_docs.py compares"}
        line = text.count("\n", 0, block.start("fence")) + 1
        found.append(Block(page, line, block["language"], textwrap.dedent(block["text"]), **said))
    return found


def literals_of(module: Module) -> Iterator[Block]:
    """The literal blocks in the docstrings of one module; they find `docstrings` in place."""
    if "::\n" not in module.path.read_text(encoding="utf-8"):
        return  # most have none, and parsing all of them takes seconds
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for found in _LITERAL.finditer(f"{ast.get_docstring(node) or ''}\n"):
            line = node.body[0].lineno + found.string.count("\n", 0, found.start(2)) - 1
            text = textwrap.dedent(found[2])
            not_run = _NOT_RUN.get(module.name, "")
            given = "local steps" if module.name in _OF_ROUNDS else "docstrings"
            yield Block(module.path, line, "python", text, "" if not_run else given, not_run)


def commands(text: str) -> list[str]:
    """The commands of a block in the language "shell": without comments, continued lines joined."""
    lines = (line.lstrip() for line in re.sub(r"\\\n\s*", "", text).splitlines())
    return [line.partition(" #")[0].strip() for line in lines if line and not line.startswith("#")]
