"""What runs without the packages of the extra `lab`, and what a command says that needs them."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.source import ROOT

pytestmark = pytest.mark.rest

EXTRA = ("matplotlib", "jinja2")
COMMANDS = ("typer", "rich")
ATTACH = f"""
import sys
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
assert "int8" in str(wire.report())
wire.detach()
dist.destroy_process_group()
print("loaded", [name for name in {EXTRA + COMMANDS} if name in sys.modules])
"""
TYPE = f"""
import contextlib, io, json, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRA}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
found = []
for words in json.load(sys.stdin):
    sys.argv[1:] = words
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("gradwire", run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
    found.append((code, out.getvalue(), err.getvalue()))
json.dump(found, sys.stdout)
"""
NEED_NOTHING = (["--help"], ["demo", "--help"], ["bench", "--help"], ["net", "check"])
NEED_IT = {
    ("demo",): "gradwire: the report needs jinja2: pip install '.[lab]' in a copy of gradwire's source",
    (
        "report",
        "bench.json",
    ): "gradwire: the report needs jinja2: pip install '.[lab]' in a copy of gradwire's source",
    (
        "probe",
        "--codecs",
        "int8",
        "--picture",
        "curves.svg",
    ): "gradwire: a picture needs matplotlib: pip install '.[lab]' in a copy of gradwire's source",
}


def run(code: str, folder: Path, given: str = "") -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attach_loads_neither_the_extra_nor_what_the_command_line_needs(tmp_path: Path) -> None:
    assert run(ATTACH, tmp_path).splitlines()[-1] == "loaded []"


def test_without_the_extra_commands_are_there_or_say_in_one_sentence_what_they_need(tmp_path: Path) -> None:
    typed = [*NEED_NOTHING, *map(list, NEED_IT)]
    found = json.loads(run(TYPE, tmp_path, json.dumps(typed)))
    for words, (code, out, err) in zip(NEED_NOTHING, found, strict=False):
        assert (code, err) == (0, ""), words
        assert out, words
    for (words, said), (code, _, err) in zip(NEED_IT.items(), found[len(NEED_NOTHING) :], strict=True):
        assert (code, err.splitlines()) == (2, [said]), words
    assert list(tmp_path.iterdir()) == []


def test_only_the_extra_brings_what_only_the_laboratory_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {line.split(">")[0] for line in project["dependencies"]}
    assert names == {"torch", "numpy", "numba", *COMMANDS}
    assert {line.split(">")[0] for line in project["optional-dependencies"]["lab"]} == set(EXTRA)
