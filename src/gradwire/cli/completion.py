"""Completion by Tab, beside commands, options and their choices. It loads no torch."""

from __future__ import annotations

import runpy
from pathlib import Path

import gradwire


def recipe_names(incomplete: str) -> list[str]:
    """The recipes whose names begin so.

    >>> recipe_names("top")
    ['topk']
    """
    # By its path, because importing any module of `gradwire.recipes` loads torch.
    table = runpy.run_path(str(Path(gradwire.__file__).parent / "recipes" / "catalogue.py"))
    return [name for name in table["MODULES"] if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """The published networks whose names begin so.

    >>> model_names("resnet5")
    ['resnet50']
    """
    from gradwire.planning.shapes import models

    return [name for name in models() if name.startswith(incomplete)]
