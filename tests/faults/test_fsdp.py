"""Real gloo ranks under FSDP2: one is killed while the others gather or scatter, and they say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.scenes_fsdp import VICTIM
from tests.support.ranks import started

pytestmark = pytest.mark.process

WORLD, TIMEOUT_S = 3, 60.0


@pytest.mark.parametrize("where", ["gather", pytest.param("scatter", marks=pytest.mark.rest)])
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
