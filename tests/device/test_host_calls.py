"""What a unit costs the host of a device: no more than the table says (`host_calls.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="launches are Triton's")

from gradwire.environment import CHECKS_KERNELS
from gradwire.kernels.device.launch import BINDS
from tests.device.host_calls import PAGE, RECIPES, TABLE, Count, Taken
from tests.support.tiers import rest


def told(*arguments: str) -> str:
    """By a process of its own, as kernels are interpreted in this one, and check their arguments."""
    command = [sys.executable, "-m", "tests.device.host_calls", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != CHECKS_KERNELS}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def counted(recipe: str) -> Taken:
    """In steps that are not timed."""
    return Taken(*(Count(*each) for each in json.loads(told(recipe))))


@pytest.mark.parametrize("recipe", rest(RECIPES, but=("int8",)))
def test_a_unit_calls_as_much_as_the_table_says(recipe: str) -> None:
    """Versions of Python, torch and Triton differ in a few calls of their own. Who needs far fewer writes the
    table anew.
    """
    row = next(each for each in TABLE.read_text(encoding="utf-8").splitlines() if f"`{recipe}`" in each)
    said = [int(each) for each in row.split("|")[2:-1]]
    unit, step = Count(*said[:4]), Count(*said[4:])
    found = counted(recipe)
    assert found.unit[1:] == unit[1:]
    assert found.step[1:] == step[1:]
    assert 0.9 * unit.calls <= found.unit.calls <= 1.1 * unit.calls
    assert 0.9 * step.calls <= found.step.calls <= 1.1 * step.calls


@pytest.mark.skipif(not BINDS, reason="this Triton launches all by itself")
@pytest.mark.parametrize(
    "recipe",
    rest(("int8", "topk(ratio=0.01)", "powersgd(warmup_steps=0)", "qsgd", "efsignsgd"), but=("int8",)),
)
def test_a_bound_launch_hands_the_driver_what_triton_would(recipe: str) -> None:
    """Of tensors that are aligned and of others, in their order; and it is traced like others."""
    assert int(told("--compared", recipe)) > 50


@pytest.mark.rest
def test_a_replayed_stretch_is_one_call() -> None:
    """Of a unit of `topk`: both kinds launch its compensation and, where kernels are replayed, two graphs."""
    eager, replayed = json.loads(told("--captured", "topk(ratio=0.01)"))
    assert replayed[0] == 2 < eager[0]
    assert replayed[1] <= eager[1] - eager[0] + replayed[0] + 4
    assert replayed[2] == 3


def test_the_page_prints_the_table() -> None:
    assert TABLE.read_text(encoding="utf-8") in PAGE.read_text(encoding="utf-8")
