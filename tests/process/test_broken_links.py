"""Real ranks over a line that fails: flipped bits that TCP lets through, a reset, silence one way or both."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.emulate.sandbox import why_not
from tests.support.source import ROOT

needed = next((why for why in map(why_not, ("root", "user")) if why is None), "namespaces")
NEEDS = [
    pytest.mark.skipif(needed is not None, reason="needs network namespaces"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs /dev/net/tun"),
]
pytestmark = [pytest.mark.process, pytest.mark.rest, pytest.mark.full, pytest.mark.timeout(900), *NEEDS]

STEPS, TIMEOUT_S = 40, 20.0
LINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "whole": ({"what": "flip", "every": 1, "after": 10**9}, ()),
    "flips": ({"what": "flip", "every": 12, "after": 20}, ()),
    "flips, unchecked": ({"what": "flip", "every": 12, "after": 20}, ("--no-checksums",)),
    "reset": ({"what": "reset", "after": 60}, ()),
    "silence": ({"what": "silence", "after": 60}, ()),
    # The store of the process group is on the first rank: once its questions are lost, once its answers.
    "half-open, to rank 0": ({"what": "half-open", "way": (1, 0), "after": 60}, ()),
    "half-open, from rank 0": ({"what": "half-open", "way": (0, 1), "after": 60}, ("--workers", "3")),
}
"""What the line does, and further arguments."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Any]]:
    """Several at once: most of the time is spent on starting processes and waiting for timeouts."""

    def run(name: str) -> Any:
        damage, more = LINES[name]
        out = tmp_path_factory.mktemp("line") / "out.json"
        command = [sys.executable, "-m", "tests.process.broken_links", str(out), json.dumps(damage)]
        command += ["--steps", str(STEPS), "--timeout-s", str(TIMEOUT_S), *more]
        subprocess.run(command, cwd=ROOT, check=True, timeout=400)
        return json.loads(out.read_text())

    with ThreadPoolExecutor(3) as pool:
        return {name: pool.submit(run, name) for name in LINES}


def test_flipped_bits_are_noticed_on_both_ranks_and_leave_no_trace(lines: dict[str, Future[Any]]) -> None:
    found, whole = lines["flips"].result(), lines["whole"].result()
    assert found["acts"].keys() == {"flip"}, "TCP lets them through"
    one, other = found["ranks"]
    assert found["acts"]["flip"] >= len(one["raised"]) > 5, "several may fall into one step"
    assert [step for step, _ in one["raised"]] == [step for step, _ in other["raised"]], "in the same steps"
    for kinds in zip(one["raised"], other["raised"], strict=True):
        assert "WireError" in {kind for _step, kind in kinds}
    assert one["counted"] == other["counted"] == STEPS
    assert {each["digest"] for each in (one, other)} == {whole["ranks"][0]["digest"]}


def test_unchecked_they_leave_other_parameters_in_silence(lines: dict[str, Future[Any]]) -> None:
    found, whole = lines["flips, unchecked"].result(), lines["whole"].result()
    assert {each.get("digest") for each in found["ranks"]} != {whole["ranks"][0]["digest"]}


@pytest.mark.parametrize("name", ["reset", "silence", "half-open, to rank 0", "half-open, from rank 0"])
def test_a_line_that_breaks_ends_the_run_on_all_ranks(lines: dict[str, Future[Any]], name: str) -> None:
    found = lines[name].result()
    assert found["acts"], "it broke"
    for each in found["ranks"]:
        assert each["ended"].startswith("TransportError")
        assert each["counted"] == each["steps"] < STEPS, "that of the last committed step"
        assert each["ended_after_s"] < 3 * TIMEOUT_S, "one collective may wait after another"
