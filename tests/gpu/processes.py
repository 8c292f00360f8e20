"""Ranks as processes over gloo that share the device: by way of the host, and with codecs on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.by_pytest import run_tests
from tests.gpu.outcomes import Outcome, Tell
from tests.gpu.scenes_trained import SCENES
from tests.support.ranks import perform

WORLDS = (2, 4)
FAULTS = ("tests/faults/test_ranks.py", "tests/faults/test_status_vote.py")


def run(tell: Tell, match: str | None = None) -> None:
    """Every recipe, then failures: a killed rank, NaN on one, an encoder that raises."""
    labels = [label for label in SCENES if match is None or match in label]
    for world in WORLDS:
        trainings(tell, world, labels)
    # In one process: each would start the ranks of all scenes, and each rank takes half a gigabyte there.
    run_tests(tell, FAULTS, match, workers=1)


def trainings(tell: Tell, world: int, labels: Sequence[str]) -> None:
    """After a recipe that breaks the ranks, the others get new ones."""
    left = list(labels)
    while left:
        with TemporaryDirectory() as folder:
            results = perform("tests.gpu.scenes_trained", world, Path(folder), left)
        broken = next((n for n, label in enumerate(left) if not _is_whole(results, label)), len(left))
        for label in left[:broken]:
            fault = difference([result[label]["value"] for result in results])
            tell(Outcome(f"{label}, {world} ranks", "failed" if fault else "passed", fault))
        for label in left[broken : broken + 1]:
            tell(Outcome(f"{label}, {world} ranks", "failed", _error(results, label)))
        left = left[broken + 1 :]


def _is_whole(results: Sequence[dict[str, Any]], label: str) -> bool:
    return all("value" in result.get(label, {}) for result in results)


def _error(results: Sequence[dict[str, Any]], label: str) -> str:
    errors = [
        f"rank {rank}: {result[label]['error'].strip().splitlines()[-1]}"
        for rank, result in enumerate(results)
        if "error" in result.get(label, {})
    ]
    return "; ".join(errors) or "a rank ended without an error"


def difference(ranks: Sequence[dict[str, Any]]) -> str:
    """What is wrong with a training; nothing if it is as it should be."""
    for way in ("there", "device"):
        found = [rank[way] for rank in ranks if rank[way] is not None]
        if len({each["digest"] for each in found}) > 1:
            return f"{way}: ranks have other parameters than each other"
        if any(each["skipped"] != 1 for each in found):
            return f"{way}: ranks skipped {[each['skipped'] for each in found]} steps, not the one with NaN"
    if any(rank["comparable"] and rank["there"]["digest"] != rank["here"]["digest"] for rank in ranks):
        return "parameters differ from the CPU's"
    return ""
