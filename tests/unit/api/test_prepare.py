"""What is prepared for a recipe is all that its steps call."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numba
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature

from gradwire._api import prepare as preparing
from gradwire.comm import run_ranks
from gradwire.contrib.randomk import sampled
from gradwire.kernels import compiler, cpu, frames, huffman
from gradwire.kernels.compiler import prepare
from gradwire.kernels.cpu.prepared import SIGNATURES
from gradwire.kernels.dispatch import OnFirstUse
from gradwire.placement.device import HostDevice
from gradwire.recipes import recipe
from gradwire.step.layout import build, by_size
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.recipes import LAWS, composed
from tests.support.source import ROOT
from tests.support.two_steps import train

Call = tuple[str, ...]
"""Name and types of what a kernel is compiled for."""


def entrances() -> Iterator[tuple[ModuleType, str, Dispatcher]]:
    """Where Python finds kernels: `_compensate` in `cpu.compensation`, `_encode_chunks` in `frames`."""
    for owner in (frames, *(each for each in vars(cpu).values() if isinstance(each, ModuleType))):
        for name, value in list(vars(owner).items()):
            if isinstance(value, Dispatcher):
                yield owner, name, value


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Call]]:
    """Which kernels Python calls meanwhile, and with what."""
    noted: set[Call] = set()

    def noting(kernel: Dispatcher) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*arguments: Any) -> Any:
            noted.add((kernel.__name__, *(str(numba.typeof(each)) for each in arguments)))
            return kernel(*arguments)

        return call

    prepare(compiler.every())  # what is compiled now would not find what it calls
    with monkeypatch.context() as patch:
        for module, name in ((frames, "frames"), (huffman, "huffman")):
            # Their own proxies would keep for good what they find meanwhile.
            patch.setattr(module, "cpu", OnFirstUse(f"{cpu.__name__}.{name}"))
        for owner, name, kernel in entrances():
            patch.setattr(owner, name, noting(kernel))
        yield noted


def declared(subjects: Collection[str]) -> set[Call]:
    """What `prepare` compiles for these subjects."""
    for subject in subjects:
        importlib.import_module(f"gradwire.kernels.cpu.{subject}")  # kernels are declared where it is loaded
    return {
        (kernel.__name__, *map(str, normalize_signature(f"({types},)")[0]))
        for subject in subjects
        for kernel, types in SIGNATURES.get(subject, [])
    }


@looped("text", LAWS)
def test_steps_call_nothing_that_was_not_prepared(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = composed(text).exchange
    prepared = declared(compiler.imported())
    sampled.cache_clear()
    for world in (2, 5):
        with calls(monkeypatch) as called:
            run_ranks(world, functools.partial(train, exchange))
        assert called <= prepared, f"{world} ranks"


ONE_OF_EACH = {text.partition("(")[0]: text for text in reversed(LAWS)}.values()


@pytest.fixture(scope="module")
def kernels_of() -> dict[str, dict[str, list[str]]]:
    """Of every recipe, with one set of options: the subjects that building it imports, and that steps do."""
    command = [sys.executable, "-m", "tests.support.imported_kernels", *ONE_OF_EACH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.rest
def test_steps_import_no_kernels_that_building_a_recipe_has_not(
    kernels_of: dict[str, dict[str, list[str]]],
) -> None:
    assert kernels_of.keys() == {*ONE_OF_EACH}
    assert {text: each["in steps"] for text, each in kernels_of.items() if each["in steps"]} == {}


@pytest.mark.parametrize(
    ("text", "subjects"),
    [
        ("dense", {"compensation"}),
        ("int4", {"blocks", "compensation"}),
        ("powersgd(rank=2)", {"compensation", "low_rank"}),
        ("topk(ratio=0.05)", {"chosen", "compensation", "places", "topk"}),
    ],
)
@pytest.mark.rest
def test_building_a_recipe_imports_its_own_kernels_only(
    text: str, subjects: set[str], kernels_of: dict[str, dict[str, list[str]]]
) -> None:
    [found] = [each["built"] for name, each in kernels_of.items() if name.startswith(text.partition("(")[0])][
        :1
    ]
    assert set(found) == subjects


@pytest.mark.parametrize(("text", "compensates"), [("dense", False), ("fp16", False), ("int8", True)])
def test_only_flat_buffers_are_compensated(
    text: str, compensates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Collection[str]] = []
    monkeypatch.setattr(compiler, "prepare", lambda subjects, turn: asked.append(subjects))
    specs = [ParameterSpec(str(size), (size, 1), torch.float32, size) for size in (10, 10**5)]
    layout = build(specs, recipe(text).build(), by_size(), torch.device("cpu"), 2)
    preparing.prepare_for(layout, HostDevice(), rank=0, world=2)
    assert any("compensation" in subjects for subjects in asked) == compensates


@pytest.mark.parametrize(("long_s", "levels"), [(0.0, ["INFO", "WARNING", "WARNING"]), (1e9, ["INFO"])])
def test_compiling_is_said_when_it_begins_and_shows_by_default_when_it_takes_long(
    long_s: float, levels: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it goes on, and not only at the end: the first of three kernels has taken longer than it may."""

    def compiles(_subjects: object, turn: int) -> None:
        for more in range(3):
            numba.njit(lambda x, more=more: x + more)(1)

    monkeypatch.setattr(compiler, "prepare", compiles)
    caplog.set_level(logging.INFO, "gradwire")
    preparing.prepare("int8", {"blocks"}, 0, long_s)
    assert [each.levelname for each in caplog.records] == levels
    assert all("compiling kernels for int8" in each for each in caplog.messages)
