"""What a unit costs the host of a device: no more than the table says (`host_calls.py`)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="launches are Triton's")

from tests.device.host_calls import PAGE, RECIPES, TABLE, Count, Taken, line
from tests.support.tiers import rest


def counted(recipe: str) -> Taken:
    """In a process of its own, as kernels are interpreted in this one."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.device.host_calls", recipe], capture_output=True, check=True, text=True
    )
    return Taken(*(Count(*each) for each in json.loads(told.stdout)))


@pytest.mark.parametrize("recipe", rest(RECIPES, but=("int8",)))
def test_a_unit_calls_no_more_than_the_table_says(recipe: str) -> None:
    """Versions of Python, torch and Triton differ in a few calls of their own."""
    row = next(each for each in TABLE.read_text(encoding="utf-8").splitlines() if f"`{recipe}`" in each)
    said = [int(each) for each in row.split("|")[2:-1]]
    unit, step = Count(*said[:4]), Count(*said[4:])
    found = counted(recipe)
    assert line(recipe, Taken(unit, step)) == row
    assert found.unit[1:] == unit[1:]
    assert found.step[1:] == step[1:]
    assert found.unit.calls <= 1.1 * unit.calls
    assert found.step.calls <= 1.1 * step.calls


def test_the_page_prints_the_table() -> None:
    assert TABLE.read_text(encoding="utf-8") in PAGE.read_text(encoding="utf-8")
