"""Real ranks on a process group of our own: who waits for a sum, DDP too, sees why there is none."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.emulate import EmulatedLink, delayed_group
from gradwire_lab.emulate.link import WIRE_VARIABLE, WireFile
from tests.support.raised import Raised, raised
from tests.support.ranks import returned, started

pytestmark = pytest.mark.process

NUMEL = 30_000


@dataclass(frozen=True)
class LeftAlone:
    """What is seen by the rank whose only peer has been killed."""

    backward: Raised
    attached: Raised
    """By a backward pass of a model that gradwire carries."""
    wait: Raised
    all_reduce: Raised


def left_alone() -> LeftAlone:
    """Under plain collectives and under DDP."""
    os.environ[WIRE_VARIABLE] = WireFile.create(EmulatedLink(1e9)).path
    group = dist.new_group(backend=delayed_group.register())
    plain, attached = (DistributedDataParallel(nn.Linear(200, 200), process_group=group) for _ in range(2))
    _wire = gradwire.attach(attached, recipe="topk")

    def train(ddp: DistributedDataParallel) -> None:
        ddp(torch.ones(1, 200)).sum().backward()

    for ddp in 2 * (plain, attached):  # DDP's second step arranges its buckets anew
        train(ddp)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # DDP before the others: it must survive the first error, not one that is there already.
    passes = [raised(partial(train, ddp)) for ddp in (plain, attached)]
    work = dist.all_reduce(torch.ones(NUMEL), group=group, async_op=True)
    sums = raised(work.wait), raised(partial(dist.all_reduce, torch.ones(NUMEL), group=group))
    return LeftAlone(*passes, *sums)


def test_survivors_of_a_killed_rank_never_get_what_was_not_summed(tmp_path: Path) -> None:
    with started(left_alone, 2, tmp_path) as ranks:
        ranks[0].wait(100.0)
        assert ranks[1].wait(10.0) == -signal.SIGKILL, returned(tmp_path, 1)
    seen: LeftAlone = returned(tmp_path, 0)
    for heard in (seen.wait, seen.all_reduce, seen.backward):
        assert heard.kind == "RuntimeError"
        assert "gloo" in heard.text
    # C++ has no types for Python's errors, so DDP's carries the name in its text.
    assert "RuntimeError: " in seen.backward.text
    assert seen.attached.kind == "TransportError"
