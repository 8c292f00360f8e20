"""`gradwire probe` on real ranks, with the variables that torchrun sets."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path

import pytest

from tests.support.ranks import FORKED, VARIABLES

pytestmark = pytest.mark.process


def probed(folder: Path, *words: str) -> tuple[str, str]:
    """What two ranks print; they must end with 0."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    ranks = [
        FORKED.Process(target=_probe, args=(rank, port, words, folder), daemon=True) for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    first, second = ((folder / f"{rank}.out").read_text(encoding="utf-8") for rank in range(2))
    assert [process.exitcode for process in ranks] == [0, 0], first + second
    return first, second


def _probe(rank: int, port: int, words: tuple[str, ...], folder: Path) -> None:
    """As `python -m gradwire probe` in a process of its own."""
    os.environ.update(VARIABLES, RANK=str(rank), WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
    sys.argv = ["gradwire", "probe", *words]
    runpy.run_module("gradwire", run_name="__main__")


def test_two_ranks_probe_their_link_and_the_first_tells(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--verbs", "all_reduce,shift", "--budget", "0.1", "--json", str(found)]
    first, second = probed(tmp_path, *words)
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


@pytest.mark.rest
def test_a_check_without_gpus_compares_gloo_with_itself_and_says_so(tmp_path: Path) -> None:
    first, second = probed(tmp_path, "--check")
    assert second == ""
    fence, _versions, ranks, why, *table, verdict, end = first.splitlines()
    assert fence == end == "```"
    assert ranks == "2 ranks over gloo: CPU, CPU"
    assert why == "no device was checked: torch finds no CUDA device"
    assert verdict == f"verdict: all as with gloo on the CPU; {why}"
    names = {line.split("  ")[0] for line in table}
    assert {"all_to_all, uint8", "shift, float32", "all_reduce/tree", "training, int8", "covap"} < names
    assert all(line.endswith("same bits as gloo") or line.startswith("auto ") for line in table)
