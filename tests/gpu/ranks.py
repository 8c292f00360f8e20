"""NCCL ranks that share one GPU, each a host of its own to NCCL, over sockets on the loopback interface.

On the CPU the same scenes run over gloo. What did not fit into the time is skipped by its name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.outcomes import Outcome, Tell
from tests.gpu.scenes_nccl import FIRST, FOUR, MORE
from tests.gpu.worlds import GROUP_S, NO_TIME, results_of, told_by_worlds
from tests.support.ranks import BACKEND, started_anew
from tests.support.where import WHERE

WITHIN_S = 285.0
"""Of the 300 s of the part."""
SCENES = "tests.gpu.scenes_nccl"
KILLED = ("int8", "dense")
"""Recipes in whose training a rank is killed."""
TRAINED = 10
"""Steps before that."""


def use_backend() -> None:
    """NCCL, or gloo on the CPU, for all ranks that are started from now on."""
    os.environ[BACKEND] = "nccl" if WHERE.type == "cuda" else "gloo"


def run(tell: Tell, match: str | None = None) -> None:
    """What is wanted most first: two ranks, a killed one, four ranks, all other recipes."""
    use_backend()
    ends_s = time.monotonic() + WITHIN_S

    def chosen(names: Sequence[str]) -> list[str]:
        return [name for name in names if match is None or match in name]

    told_by_worlds(tell, SCENES, 2, chosen(list(FIRST)), judged, ends_s)
    for text in KILLED:
        for name in chosen([f"a killed rank, {text}"]):
            tell(killed(name, text, ends_s))
    told_by_worlds(tell, SCENES, 2, chosen(list(MORE)), judged, ends_s)
    told_by_worlds(tell, SCENES, 4, chosen(list(FOUR)), judged, ends_s)


def judged(ranks: Sequence[dict[str, Any]]) -> Outcome:
    """Nothing is wrong on any rank, and all have one fingerprint."""
    wrong = [f"rank {number}: {rank['wrong']}" for number, rank in enumerate(ranks) if rank["wrong"]]
    if len({rank["digest"] for rank in ranks}) > 1:
        wrong.append("ranks have other parameters than each other")
    return Outcome("", "failed" if wrong else "passed", "; ".join(wrong) or ranks[0]["says"])


def killed(name: str, text: str, ends_s: float) -> Outcome:
    """Rank 1 is killed in the middle of training: what the other one hears, and when.

    It raises, or NCCL's watchdog ends it; it must not outlive the group's timeout by much.
    """
    if time.monotonic() + 2 * GROUP_S > ends_s:
        return Outcome(name, "skipped", NO_TIME)
    with (
        TemporaryDirectory() as at,
        started_anew("tests.gpu.scenes_killed", 2, folder := Path(at), [text], GROUP_S) as ranks,
    ):
        if not _trains(folder, ranks[0]):
            return Outcome(name, "failed", f"training never began: {results_of(folder, 0)}")
        ranks[1].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        try:
            code = ranks[0].wait(GROUP_S + 20.0)
        except TimeoutExpired:
            return Outcome(name, "failed", f"the other rank hangs {time.monotonic() - killed_s:.0f} s later")
        after_s, told = time.monotonic() - killed_s, results_of(folder, 0).get(text, {})
    if "value" not in told:
        return Outcome(name, "passed", f"the other rank was ended with {code} after {after_s:.1f} s, unheard")
    heard = told["value"]
    return Outcome(
        name, "passed", f"{heard['error']} after {heard['raised_s'] - killed_s:.1f} s: {heard['text'][:200]}"
    )


def _trains(folder: Path, rank: Popen[bytes]) -> bool:
    ends_s = time.monotonic() + 60.0
    while len((folder / "0.out").read_text().splitlines()) < TRAINED:
        if rank.poll() is not None or time.monotonic() > ends_s:
            return False
        time.sleep(0.05)
    return True
