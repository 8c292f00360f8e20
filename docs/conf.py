"""How Sphinx makes the site: `make docs`. Pages are Markdown, the reference is made of docstrings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from gradwire.version import __version__

project = "gradwire"
copyright = "the gradwire authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["pictures"]
nitpicky = False
default_role = "code"  # docstrings write names in single backticks

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"gradwire {__version__}"
html_copy_source = False
# The one setting: `Source` under [project.urls]. The project has no public repository yet.
_PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
SOURCE: str | None = _PROJECT["project"].get("urls", {}).get("Source")
if SOURCE is not None:
    html_theme_options = {"source_repository": SOURCE, "source_branch": "main", "source_directory": "docs/"}


def linked(page: str, name: str, source: str | None) -> str:
    """The text of a page whose path is `name`. Links that lead out of the site, to Markdown or folders of the
    source tree, lead to the repository at the address `source`; without one they become their paths.
    """
    up = re.escape("../" * (name.count("/") + 1))
    out = re.compile(rf"\[([^\]]*)\]\({up}((?:[\w/-]|\.(?!py))+)(#[^)]*)?\)")
    if source is None:
        return out.sub(lambda found: f"{found[1].strip('`')} (`{found[2]}`)", page)
    return out.sub(lambda found: f"[{found[1]}]({source}/blob/main/{found[2]}{found[3] or ''})", page)


def _read(app: object, name: str, content: list[str]) -> None:
    content[0] = linked(content[0], name, SOURCE)


def _paragraphs(
    _app: object, _what: str, _name: str, _of: object, _options: object, lines: list[str]
) -> None:
    """What a recipe says after "Travels", "Paper" and "Use when" becomes a paragraph, without its indents."""
    said = re.compile(r"^((?:Travels|Paper|Use when): .*(?:\n +.*)*)", re.MULTILINE)
    text = said.sub(lambda found: "\n" + re.sub(r"\n +", "\n", found[1]) + "\n", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _paragraphs)
    app.connect("source-read", _read)
