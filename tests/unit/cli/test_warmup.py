"""What `gradwire warmup` has compiled, and where it says that it is."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from typer.testing import CliRunner, Result

from gradwire import kernels
from gradwire.cli.main import app
from gradwire.kernels.cpu import cache
from gradwire.kernels.cpu.prepared import SIGNATURES


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The subjects of `prepare` that were asked for."""
    asked: list[set[str]] = []

    def prepare(modules: Collection[str] | None = None, turn: int = 0) -> None:
        parts = SIGNATURES.keys()
        asked.append(set(parts if modules is None else parts & modules))

    monkeypatch.setattr(kernels, "prepare", prepare)
    return asked


def warmup(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["warmup", *arguments])


def test_all_kernels_by_default(prepared: list[set[str]]) -> None:
    done = warmup()
    assert done.exit_code == 0, done.output
    assert prepared == [SIGNATURES.keys()]
    assert str(cache.writable()) in done.output


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("int8", {"blocks", "folding"}),
        ("topk(ratio=0.1)", {"chosen", "folding", "places", "topk"}),
        ("covap", {"folding"}),  # whatever it will decide
    ],
)
def test_those_of_one_recipe(prepared: list[set[str]], recipe: str, parts: set[str]) -> None:
    assert warmup("--recipe", recipe).exit_code == 0
    assert prepared == [parts]


def test_a_recipe_that_chooses_gets_all_that_it_may_choose(prepared: list[set[str]]) -> None:
    assert warmup("--recipe", "auto").exit_code == 0
    assert warmup("--recipe", "auto(late=2)").exit_code == 0
    assert [subjects & {"blocks", "folding", "topk"} for subjects in prepared] == [
        {"blocks", "folding"},
        {"blocks", "folding", "topk"},
    ]


def test_what_cannot_be_is_said_before_anything_is_compiled(
    prepared: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warmup("--recipe", "tpok").exit_code == 2
    monkeypatch.setattr(cache._CONFIG, "CACHE_DIR", __file__)
    refused = warmup()
    assert refused.exit_code == 1
    assert __file__ in refused.output
    assert prepared == []
