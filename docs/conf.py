"""How Sphinx makes the site: `make docs`. Pages are Markdown, the reference is made of docstrings."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

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


def _mention(app: object, name: str, content: list[str]) -> None:
    """Links that lead out of the site, to Markdown or folders of the source tree, become their paths.

    The project has no public home yet to which they could lead.
    """
    up = re.escape("../" * (name.count("/") + 1))
    out = re.compile(rf"\[([^\]]*)\]\({up}((?:[\w/-]|\.(?!py))+)(?:#[^)]*)?\)")
    content[0] = out.sub(lambda found: f"{found[1].strip('`')} (`{found[2]}`)", content[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _mention)
