"""What each rank sees of each fault, and after how many seconds: the faults for real, once, as Markdown rows.

    python -m tests.faults.show

Three ranks over gloo on this machine, rank 1 is the unlucky one. Seconds are from the signal to the exception
for ranks that are killed or stopped, else from the start of `backward()` or `attach`.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.faults.scenes_verdict import UNLUCKY
from tests.faults.test_launcher_ends import (
    MODES,
    WORKERS,
    gone,
    homes,
    launched,
    ranks_of,
    unique_duration,
)
from tests.support.command import eventually, processes
from tests.support.models import perceptron
from tests.support.ranks import Results, perform, started, started_anew, value

WORLD, TIMEOUT_S, GUARD_S = 3, 10.0, 120.0


class Seen(NamedTuple):
    """One row."""

    fault: str
    who: str
    saw: str
    after_s: float | None
    state: str


def _short(kind: str, text: str) -> str:
    """The first words of an error, without the place in a library's source."""
    line = " ".join(re.sub(r"\[/\S+\]", "", text).split())
    return f"`{kind}`: {line if len(line) <= 110 else line[:109] + '…'}".replace("|", "/")


# -- from outside


def signalled(sent: signal.Signals) -> Iterator[Seen]:
    """One rank is killed, or stopped for longer than the group's timeout."""
    timeout_s = TIMEOUT_S if sent == signal.SIGSTOP else 60.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started("tests.faults.scenes_ranks", WORLD, folder, ["topk"], timeout_s) as ranks:
            _wait_for_training(folder)
            ranks[UNLUCKY].send_signal(sent)
            sent_s = time.monotonic()
            for rank in range(WORLD):
                if rank != UNLUCKY:
                    ranks[rank].wait(GUARD_S)
            if sent == signal.SIGSTOP:
                ranks[UNLUCKY].send_signal(signal.SIGCONT)
                ranks[UNLUCKY].wait(GUARD_S)
        for rank in range(WORLD):
            path = folder / f"{rank}.json"
            if path.exists():
                seen = json.loads(path.read_text())["topk"]["value"]
                saw, state = _short(seen["error"], seen["text"]), _memory(seen["intact"])
                yield Seen(f"{sent.name} of rank 1", str(rank), saw, seen["raised_s"] - sent_s, state)
            else:
                yield Seen(f"{sent.name} of rank 1", str(rank), "is gone", None, "-")


def interrupted() -> Iterator[Seen]:
    """Ctrl-C for a rank that waits for one that does not answer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started_anew("tests.faults.scenes_ranks", 2, folder, ["topk"], 100.0) as ranks:
            _wait_for_training(folder)
            ranks[UNLUCKY].send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            ranks[0].send_signal(signal.SIGINT)
            sent_s = time.monotonic()
            code = ranks[0].wait(GUARD_S)
            yield Seen("SIGINT, waiting", "0", f"ends with {code}", time.monotonic() - sent_s, "-")


def _wait_for_training(folder: Path) -> None:
    if not eventually(lambda: len((folder / "0.out").read_text().splitlines()) >= 20, GUARD_S):
        raise TimeoutError("training never began")


RANK = (
    "import os, pathlib, sys, time; pathlib.Path(sys.argv[2], os.environ['RANK']).touch();"
    "time.sleep(float(sys.argv[1]))"
)
"""What the launcher runs: it says that it has begun, and waits."""


def launcher(mode: str, number: signal.Signals) -> Iterator[Seen]:
    """The launcher of an emulated network is ended; its ranks must not stay."""
    marker = unique_duration()
    with (
        tempfile.TemporaryDirectory() as folder,
        launched(mode, sys.executable, "-c", RANK, marker, folder, marker=marker) as process,
    ):
        if not eventually(lambda: len(list(Path(folder).iterdir())) == WORKERS, GUARD_S):
            raise TimeoutError("ranks never began")
        inhabited = homes(ranks_of(marker)) if mode != "backend" else set()
        process.send_signal(number)
        sent_s = time.monotonic()
        code = process.wait(GUARD_S)
        fault = f"{number.name} of the launcher, mode {mode}"
        yield Seen(fault, "launcher", f"ends with {code}", time.monotonic() - sent_s, "-")
        left = not eventually(lambda: gone(marker, inhabited) if inhabited else not processes(marker))
        saw = "stay" if left else "ended, and so are their namespaces" if inhabited else "ended"
        yield Seen(fault, "all", saw, time.monotonic() - sent_s, "-")


# -- from inside


def verdicts() -> Iterator[Seen]:
    """An exception in encode, and a NaN in the loss."""
    with tempfile.TemporaryDirectory() as name:
        found = perform("tests.faults.scenes_verdict", WORLD, Path(name), ["accident", "nan, topk"])
    for rank, seen in enumerate(value(found, "accident")):
        saw = _short(seen["error"], seen["text"])
        yield Seen("exception in encode on rank 1", str(rank), saw, seen["after_s"], _memory(seen["intact"]))
    for rank, seen in enumerate(value(found, "nan, topk")):
        mean = "a mean with finite elements" if seen["any_finite"] else "the mean is NaN throughout"
        skipped, same = seen["skipped"], seen["as_without"]
        saw = f"in that step {mean}; {skipped} step skipped; parameters as without it: {same}"
        yield Seen("NaN in the loss on rank 1", str(rank), saw, None, _memory(seen["intact"]))


def _memory(intact: bool) -> str:
    return "as before" if intact else "CHANGED"


def attaches(build: Callable[[], nn.Module], recipe: str) -> dict[str, Any]:
    """What `attach` raises, and when."""
    ddp = DistributedDataParallel(build())
    dist.barrier()
    start_s = time.monotonic()
    try:
        gradwire.attach(ddp, None, recipe)
    except Exception as error:
        after_s = time.monotonic() - start_s
        return {"error": type(error).__name__, "text": str(error), "after_s": after_s}
    return {"error": "nothing", "text": "", "after_s": time.monotonic() - start_s}


def _other_recipe() -> dict[str, Any]:
    return attaches(perceptron, "topk(ratio=0.2)" if dist.get_rank() == UNLUCKY else "topk(ratio=0.1)")


def _other_model() -> dict[str, Any]:
    odd = dist.get_rank() == UNLUCKY
    return attaches(lambda: perceptron() if odd else nn.ModuleDict({"net": perceptron()}), "topk")


SCENES = {"another recipe on rank 1": _other_recipe, "a model of other names on rank 1": _other_model}


def mismatches() -> Iterator[Seen]:
    """Ranks that are not set up alike."""
    with tempfile.TemporaryDirectory() as name:
        found: Results = perform("tests.faults.show", WORLD, Path(name), list(SCENES))
    for fault in SCENES:
        for rank, seen in enumerate(value(found, fault)):
            yield Seen(fault, str(rank), _short(seen["error"], seen["text"]), seen["after_s"], "-")


FAULTS: tuple[Callable[[], Iterator[Seen]], ...] = (
    partial(signalled, signal.SIGKILL),
    partial(signalled, signal.SIGSTOP),
    interrupted,
    verdicts,
    mismatches,
    *(partial(launcher, mode, number)
      for mode in (*MODES[:1], "backend") for number in (signal.SIGINT, signal.SIGKILL)),
)  # fmt: skip


def main() -> None:
    """All rows, as they come."""
    print("| fault | rank | what it saw | after | memory |\n|---|---|---|---|---|", flush=True)
    for fault in FAULTS:
        for seen in fault():
            after = "-" if seen.after_s is None else f"{seen.after_s:.2f} s"
            print(f"| {seen.fault} | {seen.who} | {seen.saw} | {after} | {seen.state} |", flush=True)


if __name__ == "__main__":
    main()
