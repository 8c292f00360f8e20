"""Blocks of code in the documents: each is run by a test, or says why not; commands can be typed."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import gradwire
from gradwire.cli.main import app
from tests.support.pages import PAGES, Block, blocks, commands
from tests.support.source import ROOT

LANGUAGES = {"python", "shell", "text", "diff", "markdown", "{toctree}", "{eval-rst}"}
RUN = ("plan", "recipes", "doctor", "--version")
"""Commands that take no more than a second or two. Of all others, arguments are parsed."""


def test_every_block_says_in_which_language_it_is() -> None:
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_stands_in_fenced_blocks(page: Path) -> None:
    # What is only indented is a formula or a drawing; a test could not tell it from code.
    indented = re.findall(r"\n\n(    \S.*)", page.read_text(encoding="utf-8"))
    assert [line for line in indented if re.search(r"gradwire[. ]|wire\.|torchrun|^    make ", line)] == []


def test_every_page_is_on_the_site() -> None:
    docs = ROOT / "docs"
    entries = (docs / "index.md").read_text(encoding="utf-8").splitlines()
    pages = {str(page.relative_to(docs).with_suffix("")) for page in PAGES if page.is_relative_to(docs)}
    assert pages - set(entries) == {"index"}


def test_what_is_not_run_names_something_that_is() -> None:
    reasons = {str(block): block.not_run for block in blocks() if block.not_run}
    paths = {where: re.findall(r"[\w./-]+\.py", reason) for where, reason in reasons.items()}
    assert [
        where for where, found in paths.items() if not any((ROOT / path).exists() for path in found)
    ] == []


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_can_be_read(block: Block) -> None:
    compile(block.text, str(block), "exec")


COMMANDS = [(block, line) for block in blocks("shell") for line in commands(block.text)]


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor"
)  # torch's own, on the Transformer that a page plans for
@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=[f"{block} {line}" for block, line in COMMANDS])
def test_a_command_can_be_typed(block: Block, line: str) -> None:
    words = shlex.split(line)
    if "gradwire" in words[:6] and words[0] in ("gradwire", "torchrun", "python"):
        _check_gradwire(words[words.index("gradwire") + 1 :])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == []
    elif words[:2] == ["pip", "install"]:
        _check_extras(words[-1])
    scripts = [word for word in words if word.endswith(".py") and "/" in word]
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def _check_gradwire(words: list[str]) -> None:
    if words[0] in RUN:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        name, *words = words
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    command.make_context(command.name, words)  # parses, and does not call


def _check_extras(requirement: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = re.findall(r"[\w-]+", requirement.partition("[")[2])
    assert set(wanted) <= set(project["optional-dependencies"])
    assert requirement.partition("[")[0] in (".", "gradwire")


@pytest.mark.parametrize("model", ["resnet50", "bert-base", "gpt2"])
def test_what_a_page_predicts_is_what_a_plan_says(model: str) -> None:
    # One cell for each model; all thirty-six take a minute.
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    [found] = re.findall(rf"^\| `{model}`, (\d+) ms \| 1 Gbit/s \| [^|]* \| ([^|]*) \|", page, re.MULTILINE)
    recipes = ("dense", "int8", "int4", "leader_topk(ratio=0.01)")
    assert f"as `{' / '.join(recipes)}`" in page
    numbers = {"rate_bit_per_s": 1e9, "delay_s": 1e-4, "step_s": int(found[0]) / 1e3}
    plan = gradwire.plan(model, workers=8, candidates=recipes, **numbers)
    share = {each.recipe: each.share_of_linear for each in plan.candidates}
    said = " / ".join(f"{100 * share[str(gradwire.recipe(each))]:.0f}" for each in recipes)
    assert found[1] == said
