"""Blocks of code in the documents: each is run by a test, or says why not; commands can be typed."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import gradwire
from gradwire.cli.cluster_options import codecs_of, model_of
from gradwire.cli.main import app
from gradwire.version import EXTRA
from tests.support.looped import looped
from tests.support.pages import PAGES, blocks, commands
from tests.support.source import ROOT

LANGUAGES = {"python", "shell", "text", "diff", "markdown", "{toctree}", "{eval-rst}"}
RUN = ("plan", "recipes", "doctor", "--version")
"""Commands that take no more than a second or two. Of all others, arguments are parsed."""
FIRST = ROOT / "docs" / "quickstart.md"


def test_every_block_says_in_which_language_it_is() -> None:
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []


def test_code_stands_in_fenced_blocks() -> None:
    # What is only indented is a formula or a drawing; a test could not tell it from code.
    indented = [
        (page, line)
        for page in PAGES
        for line in re.findall(r"\n\n(    \S.*)", page.read_text(encoding="utf-8"))
    ]
    assert [each for each in indented if re.search(r"gradwire[. ]|wire\.|torchrun|^    make ", each[1])] == []


def test_no_message_installs_an_extra_by_a_name_that_nobody_has_published() -> None:
    named = [path for path in (ROOT / "src").rglob("*.py") if "gradwire[" in path.read_text(encoding="utf-8")]
    assert named == []


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


def test_python_can_be_read() -> None:
    for block in blocks("python"):
        compile(block.text, str(block), "exec")


def typed(of_first: bool) -> Iterable[str]:
    """The commands of the first page that a user types from, or those that only other pages have."""
    found = [(block.page == FIRST, line) for block in blocks("shell") for line in commands(block.text)]
    first = dict.fromkeys(line for is_first, line in found if is_first)
    return first if of_first else dict.fromkeys(line for _, line in found if line not in first)


def test_the_commands_of_the_first_page_can_be_typed() -> None:
    lines = typed(of_first=True)
    assert lines
    assert [(line, wrong) for line in lines if (wrong := fault(line))] == []


@pytest.mark.rest
@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor"
)  # torch's own, on the Transformer that a page plans for
def test_the_commands_of_other_pages_can_be_typed() -> None:
    assert [(line, wrong) for line in typed(of_first=False) if (wrong := fault(line))] == []


@looped(
    "line",
    [
        "gradwire demonstration",
        "gradwire bench --recipe int8",
        "gradwire plan --model no_such_model --workers 8 --rate 1gbit",
        "make everything",
        "pip install .[everything]",
        "pip install gradwire[lab]",
        "python examples/no_such_example.py",
    ],
)
def test_a_command_that_cannot_be_typed_is_found(line: str) -> None:
    assert fault(line)


def fault(line: str) -> str:
    """Why a command cannot be typed as it stands; "" if it can."""
    words = shlex.split(line)
    wrong = [word for word in words if word.endswith(".py") and "/" in word and not (ROOT / word).exists()]
    if "gradwire" in words[:6] and words[0] in ("gradwire", "torchrun", "python"):
        wrong += _of_gradwire(words[words.index("gradwire") + 1 :])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        wrong += [word for word in words[1:] if "=" not in word and word not in targets]
    elif words[:2] == ["pip", "install"]:
        if words[2] == "torch":  # the CPU's build, from an index of its own
            return ""
        name, _, extras = words[-1].partition("[")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        wrong += set(re.findall(r"[\w-]+", extras)) - set(project["optional-dependencies"])
        wrong += {name} - {EXTRA.split("'")[1].partition("[")[0]}
    return ", ".join(wrong)


def _of_gradwire(words: list[str]) -> list[str]:
    if words[0] in RUN:
        done = CliRunner().invoke(app, words)
        return [done.output or repr(done.exception)] if done.exit_code else []
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        name, *words = words
        if name not in command.commands:
            return [f"there is no command {name!r}"]
        command = command.commands[name]
    try:
        command.make_context(command.name, words)  # parses, and does not call
    except Exception as error:
        return [repr(error)]
    return []


@pytest.mark.rest
@looped("model", ["resnet50", "bert-base", "gpt2"])
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


@pytest.mark.rest
@looped("rate", [250, 125, 40, 10])
def test_steps_on_one_machine_are_those_of_a_plan(rate: int) -> None:
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    recipes = ("dense", "bf16", "int8", "fp8", "int4")
    numbers = {"workers": 8, "rate_bit_per_s": 1e9 * rate, "delay_s": 0.0, "step_s": 1.4}
    codecs = codecs_of("free", list(recipes))
    model = model_of(None, None, "1.2B", None)
    plan = gradwire.plan(model, candidates=recipes, codecs=codecs, gpu=True, **numbers)
    found = {each.recipe: f"{each.step_s:.2f} s" for each in plan.candidates}
    dense, bf16, int8, fp8, int4 = (found[str(gradwire.recipe(each))] for each in recipes)
    assert int8 == fp8
    assert f"| {rate} Gbit/s | {dense} | {bf16} | {int8} | {int4} |" in page
