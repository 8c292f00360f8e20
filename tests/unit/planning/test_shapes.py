"""Profiles from files, and when their parameters are ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.planning.shapes import load, models, read, ready_of
from tests.support.looped import looped


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_both_forms_of_a_file(tmp_path: Path) -> None:
    layers = {"layers": [["in", 6, [[3, 2], [3]]], ["out", 2, [[1, 2]]]]}
    with_macs = read(written(tmp_path / "net.json", layers))
    assert (with_macs.model, with_macs.parameters, with_macs.macs) == ("net", 11, 8)
    plain = read(written(tmp_path / "plain.json", {"weight": [3, 2], "bias": [3]}))
    assert [(layer.name, layer.shapes) for layer in plain.layers] == [
        ("weight", ((3, 2),)),
        ("bias", ((3,),)),
    ]


@pytest.mark.parametrize("document", [[], {"layers": [["a", 1]]}, {"a": 3}, {"a": [0]}, {}])
def test_a_file_of_another_form_is_refused(tmp_path: Path, document: object) -> None:
    with pytest.raises(ValueError, match=r"net\.json"):
        read(written(tmp_path / "net.json", document))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json"):
        read(tmp_path / "none.json")


def test_a_model_by_its_usual_name() -> None:
    assert load("ViT-B/16") == load("vit_b16")
    assert load("Qwen2.5-7B") == load("qwen2_5_7b")
    with pytest.raises(ValueError, match=r"no shape profile; did you mean 'resnet50'.*bert_large"):
        load("resnet51")
    with pytest.raises(ValueError, match="no shape profile; Known are alexnet"):
        load("zzz")


@looped("model", models())
def test_parameters_are_ready_in_order_and_all_at_the_end(model: str) -> None:
    profile = load(model)
    backward = ready_of(profile, 0.5, 2.0)
    assert list(backward.ready_s) == sorted(backward.ready_s)
    assert backward.ready_s[-1] == backward.total_s == 2.0
    assert sum(backward.numel) == profile.parameters
    assert set(ready_of(profile, 0.5, 2.0, overlap=False).ready_s) == {2.0}


def test_without_multiply_adds_layers_take_equally_long(tmp_path: Path) -> None:
    profile = read(written(tmp_path / "net.json", {"a": [9], "b": [1], "c": [2], "d": [1]}))
    assert ready_of(profile, 0.0, 4.0).ready_s == (1.0, 2.0, 3.0, 4.0)
