"""A job over a store whose processes are killed, one by one and all, and which others join."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from gradwire.members.bucket.objects import Bucket
from gradwire.members.bucket.progress import living, sealed
from gradwire.members.bucket.records import SPEC
from tests.support.source import ROOT

SITE = """
import sys
import time
from pathlib import Path

import torch
import gradwire

name, url, saves, stop = sys.argv[1:]
model = torch.nn.Linear(20, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
members = gradwire.members.store(
    url, name, at_least=1, beat_s=1.0, patience_s=60.0, snapshot_every=3, wait_s=300.0
)
wire = gradwire.outer(model, optimizer, "topk(ratio=0.2)", every=4, members=members, resume=saves)
landed = 0
while not Path(stop).exists():
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    if wire.attempts % 6 == 0:
        wire.save(saves)
    if landed != wire.report().rounds_committed:
        landed = wire.report().rounds_committed
        print(wire.rounds, *wire.members, flush=True)
    time.sleep(0.02)
wire.detach()
print("end", flush=True)
"""
A, B, C = "site-a", "site-b", "site-c"

Site = subprocess.Popen[str]


def after_rounds(process: Site, rounds: int, *names: str) -> int:
    """Read until a process has landed so many rounds of these members since it has begun; the number of the
    last one.

    Rounds that it finds sealed when it begins are none of them.
    """
    assert process.stdout is not None
    for line in process.stdout:
        number, *members = line.split()
        rounds -= members == [*names]
        if not rounds:
            return int(number)
    raise AssertionError("it has ended")


def killed(*processes: Site) -> None:
    for each in processes:
        each.send_signal(signal.SIGKILL)
        each.wait()


def check_that_no_kill_costs_a_sealed_round(url: str, folder: Path) -> None:
    """Kill a site twice and then both, and start them again; at last let a third one join."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    stop, store = folder / "stop", Bucket(url)
    with ExitStack() as started:

        def start(name: str) -> Site:
            command = [sys.executable, "-c", SITE, name, url, str(folder / f"{name}.saves"), str(stop)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        a, b = start(A), start(B)
        after_rounds(b, 2, A, B)
        run = store.get(SPEC)
        for _ in range(2):
            killed(b)
            b = start(B)
            after_rounds(b, 2, A, B)
        killed(a, b)
        before = [each.weights for each in sealed(store)]
        a, b = start(A), start(B)
        assert [after_rounds(each, 2, A, B) >= len(before) + 2 for each in (a, b)] == [True, True]
        c = start(C)
        last = after_rounds(c, 2, A, B, C)
        assert after_rounds(a, 1, A, B, C) <= last
        stop.touch()
        assert [each.communicate(timeout=600)[0].splitlines()[-1] for each in (a, b, c)] == ["end"] * 3
    assert [each.weights for each in sealed(store)][: len(before)] == before
    assert [each.name for each in living(store)] == [A, B, C]
    assert store.get(SPEC) == run  # never a second one
