"""FSDP2's own traffic on emulated nodes: bytes at each node's interface."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import gradwire
from gradwire_lab import emulate
from tests.process.fsdp_on_nodes import LAYERS, NODES, NUMEL, WIDTH, WORLD

pytestmark = [pytest.mark.network, pytest.mark.process, pytest.mark.rest]
NAMESPACES = next((mode for mode in ("root", "user") if emulate.why_not(mode) is None), None)

SHARD = NUMEL / 4
GATHERED = SHARD * (1 + 4 / 128)
"""A coded shard. int8 has a scale for 128 elements in gathers, and for 256 in scatters; int4 for 128."""
LEAVES = {
    # Forward and backward: a ring passes three shards on, two levels pass on the two of the node.
    "stock": 4 * 3 * 4 * SHARD,  # gloo's reduce-scatter sends as much as two gathers
    "flat": 2 * 3 * GATHERED + 4 * SHARD * (1 + 4 / 256),
    "by nodes": 2 * 2 * GATHERED + 2 * SHARD * (1 + 4 / 256),
    "int4 by nodes": 2 * 2 * GATHERED + 2 * SHARD * (0.5 + 4 / 128),
}
"""Bytes that leave a node of two in a step."""


@pytest.mark.skipif(NAMESPACES is None, reason="no network namespaces")
def test_two_levels_send_a_shard_once_to_each_other_node(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tests.process.fsdp_on_nodes", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    planned = _planned()
    for way, nodes in json.loads(out.read_text()).items():
        for sent in nodes:
            # Headers are 1 to 2 %, and ranks agree that all are there.
            assert 1 <= sent / LEAVES[way] < 1.05, (way, nodes)
            assert 1 <= sent / planned.get(way, LEAVES[way]) < 1.05, (way, nodes)


def _planned() -> dict[str, float]:
    """Bytes over a node's link, as a plan has them. Of coded traffic it knows two levels only."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    ways = {"dense": "stock", "int8+int8": "by nodes", "int4+int8": "int4 by nodes"}
    found = gradwire.plan(
        model,
        workers=WORLD,
        per_node=WORLD // NODES,
        rate_bit_per_s=1e9,
        inside_bit_per_s=1e10,
        step_s=0.1,
        sharded=True,
        candidates=list(ways),
    )
    return {ways[each.recipe]: each.node_bytes for each in found.candidates}
