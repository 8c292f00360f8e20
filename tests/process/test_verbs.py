"""The verbs over real gloo ranks give what the slow computation gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.mark.parametrize("world", [1, 2, 4])
def test_verbs_over_gloo(world: int, tmp_path: Path) -> None:
    value(Scenes("tests.process.scenes_verbs", world, tmp_path), "verbs")


@pytest.mark.rest
@pytest.mark.parametrize("after", ["verbs", "exit"])
def test_after_all_verbs_or_inside_a_callback_interpreters_end_in_good_order(
    after: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", f"tests.process.scenes_{after}"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "3", str(tmp_path / "meeting")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
