"""How Sphinx makes the site: `make docs`. Pages are Markdown, the reference is made of docstrings."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from gradwire.version import __version__

project = "gradwire"
copyright = "the gradwire authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["pictures", "results/pictures"]
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
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
# The one setting: `Source` under [project.urls]. The project has no public repository yet.
_PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
SOURCE: str | None = _PROJECT["project"].get("urls", {}).get("Source")
if SOURCE is not None:
    html_theme_options = {"source_repository": SOURCE, "source_branch": "main", "source_directory": "docs/"}


REPORTS = "benchmarks/results"
"""Where the source tree has the reports. `make docs` copies them beside the pages, as `results`."""


def linked(page: str, name: str, source: str | None) -> str:
    """The text of a page whose path is `name`. Links to other pages and to reports stay within the site.

    Links to Markdown or folders elsewhere in the source tree lead to the repository at the address `source`;
    without one they become their paths. Those to scripts are left as they are: Sphinx offers them as files.
    """
    is_report = name.startswith("results/")
    here = posixpath.dirname(f"{REPORTS}/{name.removeprefix('results/')}" if is_report else f"docs/{name}")
    shown = posixpath.dirname(f"docs/{name}")

    def led(found: re.Match[str]) -> str:
        text, place = found[1], found[3] or ""
        path = posixpath.normpath(posixpath.join(here, found[2]))
        if path.startswith(REPORTS) and path.endswith(".md"):
            path = f"docs/results{path.removeprefix(REPORTS)}"
        if path.startswith("docs/"):
            return f"[{text}]({posixpath.relpath(path, shown)}{place})"
        if source is None:
            return f"{text.strip('`')} (`{path}`)"
        return f"[{text}]({source}/blob/main/{path}{place})"

    return re.sub(r"\[([^\]]*)\]\((\.\./(?:[\w/-]|\.(?!py))+)(#[^)]*)?\)", led, page)


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
