"""Exact gathers on an emulated network: bytes at the interface, beside what is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire_lab import emulate

pytestmark = [pytest.mark.network, pytest.mark.process, pytest.mark.rest, pytest.mark.timeout(400)]
NAMESPACES = next((mode for mode in ("root", "user") if emulate.why_not(mode) is None), None)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "exact_gathers.py"
STEPS = 12


@pytest.mark.skipif(NAMESPACES is None, reason="no network namespaces")
def test_bytes_at_the_interface_are_those_that_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--what", "run", "--world", "2", "--steps", str(STEPS), "--rate", "unlimited"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in json.loads(out.read_text()):
        own = rank["dense+exact"]
        assert own["bits"]
        # Headers are 1 to 2 %, and ranks meet at the begin and at the end.
        assert 1 <= own["interface"] / own["counted"] < 1.03
        assert own["interface"] < rank["stock"]["interface"]
