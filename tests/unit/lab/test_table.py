"""How a bench's results look in a terminal, wide or narrow."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from gradwire_lab.bench.measurement import Measured
from gradwire_lab.bench.rows import rows
from gradwire_lab.bench.settings import BOUND, BOUND_AGAIN, parse_entry
from gradwire_lab.bench.statistics import StepSample
from gradwire_lab.bench.table import tables

LONG = "powersgd_hook(bucket_cap_mb=100)"
SETTINGS = {"workload": "convnet", "workers": 2, "rate": "200mbit", "delay": "0", "mode": "root"}
SETTINGS |= {"policy": "none", "rounds": 3, "steps": 2, "workload_facts": {}}


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_name_and_no_heading_is_cut_at_any_width(width: int) -> None:
    step = StepSample(1.0, 0.01, 0.1, 0.2, 0.3, 0.04, 0.5, 2.0, None)
    entries = [BOUND, parse_entry(LONG, "peer"), parse_entry("int8", "recipe"), BOUND_AGAIN]
    found = rows([Measured(entry, rounds=[[[step] * 2] * 2] * 3) for entry in entries], 2)
    console = Console(width=width, file=(shown := StringIO()))
    console.print(tables({"settings": SETTINGS, **found}))
    lines = shown.getvalue().splitlines()
    assert sum(LONG in line for line in lines) == 2
    for name in (BOUND.name, "int8", BOUND_AGAIN.name):
        assert any(line.strip().startswith(name) for line in lines)
    assert "counted" in " ".join(lines)
    assert max(map(len, lines)) <= width
