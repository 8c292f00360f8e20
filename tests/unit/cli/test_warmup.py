"""What `gradwire warmup` has compiled, and where it says that it is."""

from __future__ import annotations

import re
import subprocess
import sys

import numba
import pytest
from typer.testing import CliRunner, Result

from gradwire.cli.main import app
from gradwire.kernels import compiler
from gradwire.kernels.cpu import cache


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The subjects of `prepare` that were asked for."""
    asked: list[set[str]] = []
    monkeypatch.setattr(compiler, "prepare", lambda subjects: asked.append(set(subjects)))
    return asked


def warmup(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["warmup", *arguments])


def test_all_kernels_by_default(prepared: list[set[str]]) -> None:
    done = warmup()
    assert done.exit_code == 0, done.output
    assert prepared == [compiler.every()]
    assert str(cache.writable()) in done.output


APART = """
import sys
from gradwire.cli.main import app
from gradwire.kernels import compiler

compiler.prepare = lambda subjects: print("asked for", *sorted(subjects))
app(["warmup", "--recipe", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("recipe", "subjects"),
    [
        pytest.param("topk(ratio=0.1)", {"chosen", "compensation", "places", "topk"}, marks=pytest.mark.rest),
        pytest.param("covap", {"compensation"}, marks=pytest.mark.rest),  # whatever it will decide
        ("auto(late=2)", {"blocks", "chosen", "compensation", "places", "topk"}),  # of all that it may choose
    ],
)
def test_those_of_one_recipe(recipe: str, subjects: set[str]) -> None:
    command = [sys.executable, "-c", APART, recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [asked] = re.findall("asked for (.*)", done.stdout)
    assert set(asked.split()) >= subjects
    assert ("topk" in asked) == ("topk" in subjects)


def test_what_cannot_be_is_said_before_anything_is_compiled(
    prepared: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warmup("--recipe", "tpok").exit_code == 2
    monkeypatch.setattr(numba.config, "CACHE_DIR", __file__)
    refused = warmup()
    assert refused.exit_code == 1
    assert __file__ in refused.output
    assert prepared == []
