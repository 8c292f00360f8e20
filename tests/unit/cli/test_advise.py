"""`gradwire advise`: which of its words are traces, and which a script."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gradwire.cli.main import app
from tests.support.looped import looped
from tests.support.traces import Run


@looped("name", ["rank0.json", "rank0.json.gz", "RANK0.JSON"])
def test_files_are_traces_by_their_names(tmp_path: Path, name: str) -> None:
    path = Run().write(tmp_path / name)
    done = CliRunner().invoke(app, ["advise", str(path), "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bound"] == "bandwidth"


def test_a_delay_that_is_stated_is_not_assumed(tmp_path: Path) -> None:
    path = Run(buckets=(8,)).write(tmp_path / "rank0.json")
    assumed, stated = (
        CliRunner().invoke(app, ["advise", str(path), *words], env={"COLUMNS": "1000"})
        for words in ((), ("--delay", "5ms"))
    )
    assert "0.3 to 3 ms are assumed; --delay states it" in assumed.output
    assert stated.exit_code == 0, stated.output
    assert "are assumed; --delay" not in stated.output
    assert "latency 1%" in assumed.output or "latency 0%" in assumed.output
    assert "latency 3%" in stated.output


def test_a_trace_is_not_run_as_a_script(tmp_path: Path) -> None:
    path = Run().write(tmp_path / "rank0.json")
    done = CliRunner().invoke(app, ["advise", str(path), "train.py"])
    assert done.exit_code == 2
    assert "train.py: it is no trace, whose name ends in .json or .json.gz" in " ".join(done.output.split())


def test_a_script_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(app, ["advise", "nowhere.py", "rank0.json"])
    assert done.exit_code == 2
    assert "nowhere.py: there is no such script" in " ".join(done.output.split())


def test_what_stands_after_the_script_is_its_own(tmp_path: Path) -> None:
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(f"import pathlib, sys\npathlib.Path({str(seen)!r}).write_text(repr(sys.argv[1:]))\n")
    words = ["--lr", "0.1", "--steps", "5000", "--json", "out.json", "--", "--help", "rank0.json"]
    done = CliRunner().invoke(app, ["advise", "--steps", "7", str(script), *words])
    assert done.exit_code == 0, done.output
    assert seen.read_text() == repr(words)


def test_an_option_before_the_script_is_that_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = CliRunner().invoke(app, ["advise", "--lr", "0.1", str(script)])
    assert done.exit_code == 2
    assert "--lr" in done.output


def test_options_may_stand_after_traces(tmp_path: Path) -> None:
    path = Run().write(tmp_path / "rank0.json")
    done = CliRunner().invoke(app, ["advise", str(path), "--rate", "4gbit", "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bound"] == "link rate"


@looped("words", [["-h"], ["--help"], ["--steps", "7", "-h"]])
def test_its_own_help_is_before_a_script(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["advise", *words])
    assert done.exit_code == 0
    assert "SCRIPT [ITS ARGUMENTS]" in done.output


def test_nothing_to_look_at_is_said() -> None:
    done = CliRunner().invoke(app, ["advise"])
    assert done.exit_code == 2
    assert "Missing argument" in done.output
