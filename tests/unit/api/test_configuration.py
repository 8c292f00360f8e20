"""All that is asked of `attach` is compared over ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gradwire._api.configuration import Configuration
from gradwire.sources.source import Source
from gradwire.unit.parameters import ParameterSpec

CPU = torch.device("cpu")
ASKED = Configuration("auto")
SPECS = (
    ParameterSpec("weight", (256, 256), torch.float32, 65536),
    ParameterSpec("bias", (256,), torch.float32, 256),
)
OTHERWISE: dict[str, Any] = {
    "recipe": "topk",
    "target": 0.5,
    "policy": {"bias": "int8"},
    "scaler": torch.amp.GradScaler("cpu"),
    "seed": 1,
    "memory_dtype": torch.bfloat16,
    "placement": "host",
    "nodes": None,
    "guard_every": 10,
    "checksums": True,
    "skipped": "keep",
    "inside": "int8",
    "gather": "int8",
}
"""Of every argument, another value than in `ASKED`."""


def fingerprint(asked: Configuration) -> dict[str, str]:
    names = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    # Replicas can be compared, and shards be coded inside a node.
    members = None if asked.guard_every else ([0], [0])
    source = Mock(Source, specs=SPECS, parameters=names, kind="a test", members=members)
    source.facts.return_value = {"buffers": "none"}
    return asked.fingerprint(asked.validated(source), source, CPU)


def test_every_argument_is_tried() -> None:
    # Where exact gathers are held is for FSDP2's own traffic. That and graphs may differ from rank to rank.
    assert {each.name for each in fields(Configuration)} - {"held_on", "cuda_graphs"} == set(OTHERWISE)


@pytest.mark.parametrize("name", OTHERWISE)
def test_ranks_that_ask_differently_have_different_fingerprints(name: str) -> None:
    first, second = fingerprint(ASKED), fingerprint(replace(ASKED, **{name: OTHERWISE[name]}))
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] != second[key]] == ["recipe" if name == "target" else name]


def test_equal_arguments_have_equal_fingerprints() -> None:
    assert fingerprint(ASKED) == fingerprint(Configuration("auto"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Configuration("auto", checksums=1), "checksums=1 is neither True nor False"),  # type: ignore[arg-type]
        (Configuration("auto", cuda_graphs=1), "cuda_graphs=1 is neither True nor False"),  # type: ignore[arg-type]
    ],
)
def test_checksums_that_cannot_be_are_refused(asked: Configuration, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked.validated(Mock(Source))


def test_a_target_leaves_the_other_options_of_auto_as_they_are() -> None:
    text = fingerprint(Configuration("auto(late=1.0)", target=0.8))["recipe"]
    assert text == "auto(target=0.8, late=1.0)"
