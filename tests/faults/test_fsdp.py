"""Real gloo ranks under FSDP2: one is killed, or cannot go on, while the others gather or scatter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.scenes_fsdp import VICTIM
from tests.support.ranks import perform, started, value

pytestmark = pytest.mark.process

WORLD, TIMEOUT_S = 3, 60.0


REST = ("scatter", "raises after the heads")


@pytest.mark.parametrize(
    "where",
    [
        "gather",
        "killed after the heads",
        *(pytest.param(where, marks=pytest.mark.rest) for where in REST),
    ],
)
def test_survivors_raise_long_before_the_timeout(tmp_path: Path, where: str) -> None:
    survivors = [rank for rank in range(WORLD) if rank != VICTIM]
    with started("tests.faults.scenes_fsdp", WORLD, tmp_path, [where], TIMEOUT_S) as ranks:
        for rank in survivors:
            ranks[rank].wait(TIMEOUT_S)
    for rank in survivors:
        told = json.loads((tmp_path / f"{rank}.json").read_text())[where]
        assert "error" not in told, told
        seen = told["value"]
        assert seen["error"] == "TransportError", seen
        assert "a collective failed" in seen["text"]
        assert seen["after_s"] < TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("way", "world"),
    [
        ("last", 2),
        *(pytest.param(way, 2, marks=pytest.mark.rest) for way in ("two", "two told")),
        pytest.param("damage", 2, marks=pytest.mark.rest),
        pytest.param("no room", 2, marks=pytest.mark.rest),
        pytest.param("damage, by nodes", 4, marks=pytest.mark.rest),
    ],
)
def test_all_ranks_raise_where_one_cannot_take_what_an_exact_gather_brings(
    tmp_path: Path, way: str, world: int
) -> None:
    # "last": it is heard of in the backward pass, which FSDP2 never ends by itself then.
    told = value(perform("tests.faults.scenes_fsdp", world, tmp_path, [way], TIMEOUT_S), way)
    for rank, seen in enumerate(told):
        if rank == VICTIM:
            assert seen["error"] == ("WireError" if "damage" in way else "MemoryError"), seen
        else:
            assert seen["error"] == "PeerFailed", seen
            assert f"rank {VICTIM} could not take the gathered parameters of module" in seen["text"]
        assert seen["after_s"] < TIMEOUT_S / 2
        assert seen["same"]
        assert seen["alike"]
