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


def test_an_option_of_the_script_is_refused_with_the_place_where_it_goes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = CliRunner().invoke(app, ["advise", str(script), "--lr", "0.1"])
    assert done.exit_code == 2
    told = " ".join(done.output.split())
    assert "--lr" in told
    assert "SCRIPT [-- ITS ARGUMENTS]" in told
