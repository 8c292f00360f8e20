"""The command itself on an emulated network, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli.main import app

pytestmark = [pytest.mark.process, pytest.mark.network]

OWN = """
import torch

from gradwire.codec.cast import cast
from gradwire.exchange.payloads import reduce
from gradwire.recipes.base import Composition, register

@register
def halves():
    return Composition(reduce(cast(torch.float16)))

def make():
    model = torch.nn.Linear(64, 64)
    return model, lambda rank, world: [torch.ones(4, 64)], lambda model, batch: model(batch).square().mean()
"""
"""A model whose steps take no time, and a recipe."""


def bench(*arguments, model=("--workload", "convnet"), folder=None):
    script = Path(sys.executable).parent / "gradwire"
    command = [script, "bench", *model, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


def test_a_recipe_of_one_s_own_is_compared_with_ddp_and_with_no_communication(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "out.json"
    words = ["--recipes", "halves", "--peers", "ddp", "--steps", "2", "--rounds", "1", "--warmup", "1"]
    done = bench(*words, "--json", str(path), model=("--model", "own:make"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["kind"]) for row in rows[1:3]] == [("ddp", "peer"), ("halves", "recipe")]
    assert [row["kind"] for row in rows] == ["bound", "peer", "recipe", "bound"]
    for row in rows:
        assert row["failed"] is None
        assert len(row["step_s_all"]) == 2
    bound, ddp, halves, _again = rows
    assert [row["replicas_identical"] for row in (ddp, halves)] == [True, True]
    assert bound["wire_bytes_per_step"] == 0
    assert 0.5 <= halves["wire_bytes_per_step"] / ddp["wire_bytes_per_step"] < 0.6
    assert "identical" in done.stdout


@pytest.mark.rest
def test_a_tiny_run_measures_everything(tmp_path):
    path = tmp_path / "out.json"
    sizes = ["--steps", "3", "--rounds", "2", "--warmup", "2"]
    policy = "*=randomk(ratio=0.1)"
    done = bench("--recipes", "fp16", "--policy", policy, "--peers", "ddp", *sizes, "--json", str(path))
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert [row["kind"] for row in document["rows"]] == ["bound", "peer", "recipe", "bound"]
    for name in ("ddp", "fp16"):
        row = rows[name]
        assert len(row["step_s_all"]) == 6
        assert row["replicas_identical"] is True
        assert 0 < row["scaling"] <= 1.5
        assert row["backward_s"] > 0
        assert row["exposed_comm_s"] > 0
        assert row["peak_bytes"] > 50e6
        assert row["evaluation"]["test_accuracy"] > 0
    if rows["ddp"]["interface_bytes_per_step"] is not None:  # no counters in backend mode
        # headers, acknowledgements and BatchNorm buffers come on top
        assert 1.0 < rows["ddp"]["interface_bytes_per_step"] / rows["ddp"]["wire_bytes_per_step"] < 1.1
    # Half by itself; a tenth, and the status vote's rows, by the policy.
    assert rows["fp16"]["wire_bytes_per_step"] < 0.2 * rows["ddp"]["wire_bytes_per_step"]
    assert document["settings"]["workers"] == 2
    assert document["settings"]["policy"] == policy
    assert "ddp" in done.stdout
    assert f"policy {policy}" in done.stdout


@pytest.mark.rest
def test_fsdp2_and_its_traffic_in_few_bits_beside_each_other(tmp_path):
    path, page = tmp_path / "out.json", tmp_path / "out.html"
    sizes = ["--steps", "2", "--rounds", "2", "--warmup", "2", "--report", str(page)]
    peers = "fsdp2;fsdp2(param_dtype=bfloat16)"
    recipes = ["--sharded", "--peers", peers, "--recipes", "dense;int4 + int8"]
    done = bench(*recipes, *sizes, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["settings"]["sharded"]
    rows = {row["name"]: row for row in document["rows"]}
    stock, short, dense, coded = (rows[name] for name in (*peers.split(";"), "dense", "int4 + int8"))
    for row in (stock, short, dense, coded):
        assert row["failed"] is None
        assert len(row["step_s_all"]) == 4
        assert row["replicas_identical"] is True
        assert row["exposed_comm_s"] is None  # FSDP2 waits within its passes
        assert row["evaluation"]["test_accuracy"] > 0
        if row["interface_bytes_per_step"] is not None:  # no counters in backend mode
            assert 1.0 < row["interface_bytes_per_step"] / row["wire_bytes_per_step"] < 1.2
    # A dense wire and stock FSDP2 train alike, bit for bit, and send as much.
    assert dense["fingerprint"] == stock["fingerprint"]
    assert dense["wire_bytes_per_step"] == stock["wire_bytes_per_step"]
    assert short["wire_bytes_per_step"] == stock["wire_bytes_per_step"] / 2
    assert coded["wire_bytes_per_step"] < stock["wire_bytes_per_step"] / 5
    assert coded["fingerprint"] != stock["fingerprint"]
    assert stock["speedup_over_fsdp2"] is None
    assert coded["speedup_over_fsdp2"]["ratio"] > 0
    assert "vs fsdp2" in done.stdout
    assert "as fast as stock FSDP2" in page.read_text()


@pytest.mark.rest
def test_exact_gathers_train_as_fsdp2_in_16_bits_for_fewer_bytes(tmp_path):
    path = tmp_path / "out.json"
    sizes = ["--steps", "2", "--rounds", "2", "--warmup", "2"]
    names = "fsdp2(param_dtype=bfloat16)", "dense+exact"
    settings = ["--sharded", "--peers", names[0], "--recipes", names[1]]
    done = bench(*settings, *sizes, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    stock, exact = (rows[name] for name in names)
    assert exact["fingerprint"] == stock["fingerprint"]
    # Exact gathers send other bytes in each step, so those of the counted steps.
    assert exact["announced_bytes_per_step"] < 0.8 * stock["wire_bytes_per_step"]
    if exact["interface_bytes_per_step"] is not None:  # no counters in backend mode
        assert 1.0 < exact["interface_bytes_per_step"] / exact["announced_bytes_per_step"] < 1.2


@pytest.mark.rest
def test_a_misspelt_peer_is_refused_with_the_nearest_name():
    done = bench("--peers", "ddb")
    assert done.returncode == 2
    assert "did you mean 'ddp'?" in done.stderr


@pytest.mark.rest
def test_bad_options_are_refused():
    done = CliRunner().invoke(app, ["bench", "--workload", "convnet", "--shards", "maybe"])
    assert done.exit_code == 2
    assert "maybe" in done.output
