"""`gradwire probe` on real ranks, started as torchrun would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.rest]


def probed(*words: str) -> tuple[str, str]:
    """What two ranks print; they must end with 0."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "gradwire", "probe", *words]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": "",
            }
            environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
            ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE))
        first, second = (process.communicate(timeout=100)[0] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0]
    return first, second


def test_two_ranks_probe_their_link_and_the_first_tells(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    first, second = probed("--verbs", "all_reduce,shift", "--budget", "0.3", "--json", str(found))
    assert "2 ranks" in first
    assert all(verb in first for verb in ("all_reduce", "shift"))
    assert second == ""
    document = json.loads(found.read_text())
    assert f"connections per link: {document['connections']['connections']} (round trip" in first
    assert document["world"] == 2
    assert set(document["verbs"]) == {"all_reduce", "shift"}
    for verb in document["verbs"].values():
        sizes, seconds = zip(*verb["points"], strict=True)
        assert len(sizes) >= 2
        assert list(sizes) == sorted(set(sizes))
        assert min(seconds) > 0.0


def test_a_check_without_gpus_compares_gloo_with_itself_and_says_so() -> None:
    first, second = probed("--check")
    assert second == ""
    fence, _versions, ranks, why, *table, verdict, end = first.splitlines()
    assert fence == end == "```"
    assert ranks == "2 ranks over gloo: CPU, CPU"
    assert why == "no device was checked: torch finds no CUDA device"
    assert verdict == f"verdict: all as with gloo on the CPU; {why}"
    names = {line.split("  ")[0] for line in table}
    assert {"all_to_all, uint8", "shift, float32", "all_reduce/tree", "training, int8", "covap"} < names
    assert all(line.endswith("same bits as gloo") or line.startswith("auto ") for line in table)
