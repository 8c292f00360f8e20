"""`gradwire plan`: what it takes, and the keys of its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gradwire.cli.cluster_options import codecs_of, model_of, places
from gradwire.cli.main import app
from gradwire.measure import codec
from gradwire.planning.costs import CodecCost, Line
from gradwire.planning.shapes import Profile
from gradwire.recipes import recipe

WORDS = ["--rate", "1gbit", "--delay", "1ms", "--step", "180ms", "--codec", "free"]
RESNET = ["plan", "--model", "resnet50", *WORDS]
KEYS = [
    *("advice", "auto", "candidates", "ccr", "codec_source", "compute_s", "dense_s", "every", "fastest"),
    *("model", "nodes", "parameters", "predicted", "sharded", "source", "target", "why", "workers"),
    "worthwhile",
]
ROW = [
    *("assumed_late", "at_most", "codec", "day_bytes", "exposed_s", "memory_bytes", "node_bytes", "recipe"),
    *("share_of_linear", "step_s", "tried", "two_levels", "wire_bytes"),
]


def document(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, [*words, "--json", "-"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_keys_of_the_document() -> None:
    found = document(*RESNET, "--workers", "4")
    assert sorted(found) == sorted(["format", *KEYS])
    assert isinstance(found["candidates"], list)
    assert all(sorted(row) == ROW for row in found["candidates"])


def test_text_and_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, [*RESNET, "--workers", "4", "--json", str(path)])
    assert done.stdout.startswith("predicted, not measured: resnet50, 25.6 M parameters, 4 ranks")
    assert json.loads(path.read_text()) == document(*RESNET, "--workers", "4")


def test_recipes_that_auto_does_not_try_are_shown_if_that_is_asked_for() -> None:
    words = [*RESNET, "--workers", "4"]
    usual, everything, named = (
        CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"}).stdout
        for more in ((), ("--all",), ("--recipes", "int8;leader_topk(ratio=0.001)"))
    )
    assert "leader_topk" not in usual
    assert "not shown: 14 recipes that auto does not try by default" in usual
    for text in (everything, named):
        assert "leader_topk(ratio=0.001)" in text
        assert "not shown" not in text
    assert "memory  residual" in usual


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--workers", "4", "--backward", "300ms"],
            "--backward 0.3 s must be positive and within --step 0.18 s",
        ),
        (["--workers", "8", "--per-node", "4"], "say what the link inside is like (--inside)"),
        (["--workers", "4", "--every", "0"], "--every 0: from 1 on"),
        (["--nodes", "3", "--workers", "8"], "--nodes 3 with --per-node 2 ranks are not --workers 8"),
    ],
)
def test_errors_name_options(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [*RESNET, *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_configuration_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("model: gpt2")
    done = CliRunner().invoke(app, ["plan", "--hf-config", str(path), *WORDS, "--workers", "4"])
    assert "it is no JSON, as a config.json has to be" in " ".join(done.output.split())


def test_the_traffic_of_fsdp2() -> None:
    found = document(*RESNET, "--workers", "4", "--sharded", "--recipes", "dense;int4 + int8")
    assert found["sharded"]
    rows = found["candidates"]
    assert isinstance(rows, list)
    assert [row["recipe"] for row in rows] == ["int4 + int8", "dense"]
    done = CliRunner().invoke(app, [*RESNET, "--workers", "4", "--sharded"])
    assert "int4 remembers a gradient of the whole model" in " ".join(done.stdout.split())


def test_rounds_of_local_steps() -> None:
    done = CliRunner().invoke(app, [*RESNET, "--workers", "2", "--every", "30"])
    assert " ".join(done.stdout.split()).startswith(
        "predicted, not measured: resnet50, 25.6 M parameters, 2 replicas, a round after 30 local steps"
    )
    assert "sparseloco" in done.stdout
    assert document(*RESNET, "--workers", "2", "--every", "30")["every"] == 30


def test_a_size_and_a_configuration_stand_for_a_model(tmp_path: Path) -> None:
    few = [*WORDS, "--workers", "4", "--recipes", "dense"]
    by_size = document("plan", "--params", "30M", *few)
    assert by_size["parameters"] == pytest.approx(30e6, rel=0.05)
    assert "assumed" in str(by_size["source"])
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "vocab_size": 100, "n_positions": 8}')
    assert document("plan", "--hf-config", str(path), *few)["parameters"] == 107_008


def test_nodes_give_the_ranks_and_their_link_inside() -> None:
    found = document(*RESNET, "--nodes", "4", "--per-node", "8", "--inside", "200gbit")
    assert (found["workers"], found["nodes"]) == (32, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*RESNET], "--workers"),
        ([*RESNET, "--workers", "6", "--nodes", "4"], "are not --workers 6"),
        (["plan", *WORDS, "--workers", "4"], "--model"),
        (["plan", "--model", "resnet", *WORDS, "--workers", "4"], "no shape profile"),
        (["plan", "--model", "resnet51", *WORDS, "--workers", "4"], "did you mean 'resnet50'?"),
        ([*RESNET, "--params", "350M", "--workers", "4"], "give one of --model, --shapes, --params"),
        (["plan", "--params", "many", *WORDS, "--workers", "4"], "such as 350M or 7B"),
        (["plan", "--hf-config", "none.json", *WORDS, "--workers", "4"], "none.json"),
        (["plan", "--model", "torch.nn:Linear", *WORDS, "--workers", "4"], "in_features"),
        (["plan", "--model", "torch.nn:no", *WORDS, "--workers", "4"], "no"),
        ([*RESNET, "--workers", "4", "--codec", "none.json"], "probe --codecs"),
        ([*RESNET, "--workers", "4", "--recipes", "int9"], "int9"),
        ([*RESNET, "--workers", "4", "--rate", "1GB"], "1GB"),
        ([*RESNET, "--workers", "4", "--every", "0"], "--every 0"),
    ],
)
def test_refused_in_a_sentence(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_a_model_is_a_name_a_file_or_what_a_function_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes.json").write_text('{"weight": [300, 200]}')
    read = model_of(None, tmp_path / "shapes.json")
    assert isinstance(read, Profile)
    assert read.parameters == 60000
    (tmp_path / "its_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(4, 10**9)\n"
    )
    monkeypatch.chdir(tmp_path)
    made = model_of("its_model:make", None)
    assert not isinstance(made, Profile)
    assert next(made.parameters()).is_meta, "16 GB of it would not fit"


def test_codecs_of_this_machine_and_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts = ["int8", "bf16"]
    assert codecs_of("cached", texts) == codecs_of("free", texts) == {}
    measured = SimpleNamespace(cost=CodecCost(Line(1.0, 2.0), Line(3.0, 4.0)))
    monkeypatch.setattr(codec, "measure_codec", lambda *_exchange, **_budget: measured)
    chosen = recipe("int8").build()
    codec.codec_cost(chosen.exchange, chosen.text)
    [(name, cost)] = codecs_of("cached", texts).items()
    assert (name, cost.encode(1), cost.decode(1)) == ("int8", 3.0, 7.0)
    encode = {"base_s": 1.0, "slope_s": 2.0, "points": []}
    decode = {"base_s": 3.0, "slope_s": 4.0, "points": []}
    stated = {"codecs": {"int8": {"encode": encode, "decode": decode}}}
    (tmp_path / "probe.json").write_text(json.dumps(stated))
    [(name, cost)] = codecs_of(str(tmp_path / "probe.json"), texts).items()
    assert (name, cost.encode(1), cost.decode(1)) == ("int8", 3.0, 7.0)


def test_places_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="give --workers"):
        places(None, None, 8)
    with pytest.raises(ValueError, match="nodes=0"):
        places(4, 0, None)
