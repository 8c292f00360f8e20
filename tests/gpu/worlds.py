"""Scenes on ranks that are processes: each outcome is told as soon as all ranks have it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.outcomes import Outcome, Tell
from tests.support.ranks import started_anew

GROUP_S = 30.0
"""Timeout of the process group."""
SCENE_S = 100.0
"""A world in which a scene has not ended after so long hangs."""

Judge = Callable[[Sequence[Any]], Outcome]
"""What ranks have returned in one scene, and the outcome without its name."""


def told_by_worlds(
    tell: Tell, module: str, world: int, scenes: Sequence[str], judge: Judge, ends_s: float
) -> None:
    """Run the `scenes` of a module, and tell what `judge` makes of each.

    After a scene that breaks the ranks, the others get new ones. What does not fit into the time until
    `ends_s`, of the monotonic clock, is skipped by its name.
    """
    left = list(scenes)
    while left and time.monotonic() < ends_s:
        with (
            TemporaryDirectory() as at,
            started_anew(module, world, folder := Path(at), left, GROUP_S) as ranks,
        ):
            error = _listen(tell, folder, ranks, left, judge, ends_s)
        if error:
            tell(Outcome(left.pop(0), "failed", error))
    for name in left:
        tell(Outcome(name, "skipped", NO_TIME))


NO_TIME = "did not fit into the time"


def _listen(
    tell: Tell, folder: Path, ranks: list[Popen[bytes]], left: list[str], judge: Judge, ends_s: float
) -> str:
    """Tell outcomes, and take their names from `left`; why the next one has none, or nothing at `ends_s`."""
    seen_s = time.monotonic()
    while True:
        codes = [rank.poll() for rank in ranks]
        results = [results_of(folder, rank) for rank in range(len(ranks))]
        while left and all("value" in each.get(left[0], {}) for each in results):
            name, seen_s = left.pop(0), time.monotonic()
            found = judge([each[name]["value"] for each in results])
            tell(Outcome(name, found.status, found.detail))
        now_s = time.monotonic()
        if not left or now_s > ends_s:
            return ""
        if all(code is not None for code in codes) or now_s - seen_s > SCENE_S:
            return _why(results, left[0], codes)
        time.sleep(0.1)


def results_of(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has returned so far; nothing while it writes."""
    try:
        found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found


def _why(results: Sequence[dict[str, Any]], name: str, codes: Sequence[int | None]) -> str:
    said = [
        f"rank {rank}: {result[name]['error'].strip().splitlines()[-1]}"
        for rank, result in enumerate(results)
        if "error" in result.get(name, {})
    ]
    hangs = [str(rank) for rank, code in enumerate(codes) if code is None]
    ended = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    hanging = [f"ranks {', '.join(hangs)} hang"] if hangs else []
    return "; ".join([*said, *ended, *hanging]) or "no rank says why"
