"""What runs without the packages of the extra `lab`, and what a command says that needs them.

Each test is an interpreter of its own, in which the packages cannot be imported.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.source import ROOT

EXTRA = ("matplotlib", "jinja2")
COMMANDS = ("typer", "rich")
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""
ATTACH = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradwire

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
wire = gradwire.attach(ddp, optimizer, "int8")
ddp(torch.ones(4, 3)).sum().backward()
optimizer.step()
print(wire.report())
wire.detach()
dist.destroy_process_group()
"""


def run(
    code: str, *words: str, folder: Path, without: tuple[str, ...] = EXTRA
) -> subprocess.CompletedProcess[str]:
    program = REFUSE.format(refused=without) + code
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_attach_needs_neither_the_extra_nor_what_the_command_line_needs(tmp_path: Path) -> None:
    done = run(ATTACH, folder=tmp_path, without=EXTRA + COMMANDS)
    assert done.returncode == 0, done.stderr
    assert "int8" in done.stdout


def test_attach_loads_neither_although_they_are_there(tmp_path: Path) -> None:
    loaded = f"print('loaded', [name for name in {EXTRA + COMMANDS} if name in sys.modules])"
    done = run(ATTACH + loaded, folder=tmp_path, without=())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["bench", "--help"], ["net", "check"]])
def test_commands_are_there_without_the_extra(words: list[str], tmp_path: Path) -> None:
    done = run("from gradwire.cli.main import app; app()", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo"], "gradwire: the report needs jinja2: pip install gradwire[lab]"),
        (["report", "bench.json"], "gradwire: the report needs jinja2: pip install gradwire[lab]"),
        (
            ["probe", "--codecs", "int8", "--picture", "curves.svg"],
            "gradwire: a picture needs matplotlib: pip install gradwire[lab]",
        ),
    ],
)
def test_a_command_that_needs_the_extra_says_so_in_one_sentence(
    words: list[str], said: str, tmp_path: Path
) -> None:
    done = run("from gradwire.cli.main import app; app()", *words, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [said]
    assert list(tmp_path.iterdir()) == []


def test_only_the_extra_brings_what_only_the_laboratory_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {line.split(">")[0] for line in project["dependencies"]}
    assert names == {"torch", "numpy", "numba", *COMMANDS}
    assert {line.split(">")[0] for line in project["optional-dependencies"]["lab"]} == set(EXTRA)


def test_the_package_is_the_command_line() -> None:
    command = [sys.executable, "-m", "gradwire", "net", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend" in done.stdout
