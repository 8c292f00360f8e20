"""The documents as their readers see them: blocks of code, by page.

A comment directly above a block says what the block alone does not:

- `<!-- given: sharded -->`: what it finds in place, by a name of `tests.process.scenes_pages`;
- `<!-- not run: REASON -->`: why no test runs it, and what does so instead.

What a page quotes from a file, whose name stands above the block, is run as that file is.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.support.source import ROOT

PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>given|not run): (?P<said>[^>]*?) -->\n)?"
    r"(?:`(?P<quoted>[\w/.-]+)`:\n\n)?"
    r"(?P<fence> *```+)(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code; `line` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str
    given: str = ""
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of all pages, or those in certain languages."""
    return [
        block for page in PAGES for block in blocks_of(page) if not languages or block.language in languages
    ]


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


def commands(text: str) -> list[str]:
    """The commands of a block in the language "shell": without comments, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
