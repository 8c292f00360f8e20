"""`gradwire probe` on real ranks, started as torchrun would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def test_two_ranks_probe_their_link_and_the_first_tells(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    found = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "gradwire",
        "probe",
        "--verbs",
        "all_reduce,shift",
        "--budget",
        "0.3",
    ]
    command += ["--json", str(found)]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
            ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE))
        first, second = (process.communicate(timeout=80)[0] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0]
    assert "2 ranks" in first
    assert all(verb in first for verb in ("all_reduce", "shift"))
    assert second == ""
    document = json.loads(found.read_text())
    assert document["world"] == 2
    assert set(document["verbs"]) == {"all_reduce", "shift"}
    for verb in document["verbs"].values():
        sizes, seconds = zip(*verb["points"], strict=True)
        assert len(sizes) >= 2
        assert list(sizes) == sorted(set(sizes))
        assert min(seconds) > 0.0
