"""`gradwire simulate`: what it takes, its keys, its plot and its picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire.cli.simulator import worlds

WORDS = ["simulate", "--model", "resnet18", "--rate", "10gbit", "--step", "100ms", "--codec", "free"]
FEW = [*WORDS, "--workers", "4,64", "--recipes", "dense;topk"]
KEYS = [
    *("alone", "codec_source", "compute_s", "every", "model", "outcomes", "parameters", "predicted", "seed"),
    *("source", "stragglers", "workers"),
]
ROW = [
    *(
        "assumed_late",
        "at_most",
        "codec",
        "day_bytes",
        "efficiency",
        "exposed_s",
        "memory_bytes",
        "node_bytes",
        "recipe",
    ),
    *("step_s", "tried", "two_levels", "warnings", "wire_bytes", "workers"),
]


def test_keys_of_the_document() -> None:
    done = CliRunner().invoke(app, [*FEW, "--json", "-"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert sorted(found) == sorted(["format", *KEYS])
    assert all(sorted(row) == ROW for row in found["outcomes"])
    assert [(row["recipe"], row["workers"]) for row in found["outcomes"]] == [
        *(("dense", 4), ("dense", 64), ("topk", 4), ("topk", 64)),
    ]


def test_recipes_that_auto_does_not_try_are_shown_if_that_is_asked_for() -> None:
    words = [*WORDS, "--workers", "4,64"]
    usual = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).stdout
    named = CliRunner().invoke(app, [*words, "--recipes", "signum;int8"], env={"COLUMNS": "200"}).stdout
    assert "signum" not in usual
    assert "recipes that auto does not try by default" in usual
    assert "residual (assumed)" in usual
    rows = [line.split()[0] for line in named.splitlines() if line.startswith(("int8", "signum"))]
    assert rows == ["int8", "signum"], "what auto tries comes first"


def test_rounds_of_local_steps() -> None:
    done = CliRunner().invoke(app, [*WORDS, "--workers", "2..8", "--every", "30"])
    assert done.exit_code == 0, done.output
    assert "a round after 30 local steps" in " ".join(done.stdout.split())
    assert "sparseloco" in done.stdout


def test_the_traffic_of_fsdp2() -> None:
    done = CliRunner().invoke(app, [*WORDS, "--workers", "4,64", "--sharded", "--json", "-"])
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)["outcomes"]
    sent = {(row["recipe"], row["workers"]): row["wire_bytes"] for row in outcomes}
    assert sent["int4+int8", 4] < sent["int8+int8", 4] < 0.3 * sent["dense", 4]


def test_table_plot_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra lab")
    path = tmp_path / "scaling.svg"
    done = CliRunner().invoke(app, [*FEW, "--picture", str(path)])
    assert done.exit_code == 0, done.output
    assert "predicted, not measured: resnet18" in done.stdout
    assert " 100 % |" in done.stdout
    assert "4 … 64 workers;  o " in done.stdout
    assert "<svg" in path.read_text()


@pytest.mark.parametrize("width", ["60", "80", "200"])
def test_worlds_that_do_not_fit_go_into_a_table_below(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    done = CliRunner().invoke(app, [*WORDS, "--recipes", "dense;leader_topk(ratio=0.01)"])
    table = done.stdout.split(" 100 % |")[0]
    assert max(map(len, table.splitlines())) <= int(width)
    assert [word for word in table.split() if word in {str(2**power) for power in range(1, 13)}] == [
        str(2**power) for power in range(1, 13)
    ]
    assert len(re.findall(r"\d+[+^!]?(?=\s)", table.split("dense", 1)[1])) >= 12


def test_the_plot_has_a_mark_for_each_world() -> None:
    done = CliRunner().invoke(app, [*WORDS, "--workers", "2..8", "--recipes", "dense"])
    plot = done.stdout.split("\n\n")[-1]
    assert plot.split("workers;")[0].count("o") == 3


@pytest.mark.parametrize("text", ["2..x", "", "4,,8", "0..8"])
def test_workers_that_are_no_numbers(text: str) -> None:
    assert CliRunner().invoke(app, [*WORDS, "--workers", text]).exit_code == 2


def test_workers_by_doubling() -> None:
    assert worlds("2..4096") == [2**power for power in range(1, 13)]
