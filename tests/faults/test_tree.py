"""Real gloo ranks: one dies in the middle of the tree by which the status vote of many ranks goes."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenes_tree import SCENES, VICTIM
from tests.support.ranks import started

pytestmark = pytest.mark.process

WORLD, TIMEOUT_S = 5, 60.0


def survivors(scene: str, folder: Path) -> list[dict[str, Any]]:
    """What those see that are left; each ends when it has seen it."""
    left = [rank for rank in range(WORLD) if rank != VICTIM]
    with started("tests.faults.scenes_tree", WORLD, folder, [scene], TIMEOUT_S) as ranks:
        deadline_s = time.monotonic() + 2 * TIMEOUT_S
        for rank in left:
            ranks[rank].wait(deadline_s - time.monotonic())
    return [json.loads((folder / f"{rank}.json").read_text())[scene]["value"] for rank in left]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All at once: most of it is the start."""
    folders = [tmp_path_factory.mktemp(scene) for scene in SCENES]  # not by several threads
    with ThreadPoolExecutor(len(SCENES)) as pool:
        seen = pool.map(survivors, SCENES, folders)
        return dict(zip(SCENES, seen, strict=True))


@pytest.mark.rest
@pytest.mark.parametrize("scene", SCENES)
def test_no_rank_waits_for_the_timeout(found: dict[str, list[dict[str, Any]]], scene: str) -> None:
    # As it was by the library's ring: a neighbour of the dead one hears of it at once, and the others when
    # their neighbours have ended.
    for seen in found[scene]:
        assert seen["error"]
        assert seen["after_s"] < TIMEOUT_S / 2
