"""Real processes: sites of two ranks over a folder that fail, die, come back, and leave."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.sources.delta import Delta
from tests.support.bits import checksums
from tests.support.local_steps import shared, steps
from tests.support.models import perceptron
from tests.support.notes import notes_in
from tests.support.ranks import FORKED, VARIABLES

pytest.importorskip("obstore")
pytestmark = [pytest.mark.process, pytest.mark.rest, pytest.mark.timeout(600)]
GUARD_S = 200.0
EVERY, GROUP_S = 3, 30.0
STOP = "stop"
"""A file that ends all that train."""


@contextmanager
def broken() -> Iterator[None]:
    """A process without memory for an offer."""
    with patch.object(Delta, "pack", side_effect=MemoryError("no memory")):
        yield


def trained(folder: Path, name: str, start: int, rank: int, kind: str, breaks_at: int = 0) -> None:
    """Train as `rank` of a site of two, by DDP or FSDP2, until there is the file `STOP`.

    `start` tells the starts of a site apart. The second rank has no memory for its first offer after
    `breaks_at` rounds.
    """
    os.environ.update(VARIABLES)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}.{start}.store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_S),
    )
    model: nn.Module = perceptron(sum(map(ord, name)))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (folder / f"{name}.{rank}.jsonl").open("a") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps({"start": start, **what}) + "\n")
            file.flush()

        members = gradwire.members.store(
            f"{folder}/run", name, at_least=1, beat_s=1.0, patience_s=60.0, snapshot_every=3, wait_s=300.0
        )
        wire = gradwire.outer(model, optimizer, "topk(ratio=0.2)", every=EVERY, members=members)

        def note_round(members: tuple[str, ...] = (), **what: Any) -> None:
            note(rounds=wire.rounds, members=members, shared=checksums(shared(wire, model)), **what)

        note_round()
        seen, step = wire.rounds, 0
        try:
            while True:
                has_ended = torch.tensor(float((folder / STOP).exists()))  # as the first rank sees it
                dist.broadcast(has_ended, 0)
                if has_ended:
                    break
                step += 1
                with broken() if rank == 1 and 0 < breaks_at <= wire.rounds else nullcontext():
                    steps(model, optimizer, [step])
                if wire.rounds != seen:
                    seen = wire.rounds
                    note_round(wire.members)
                time.sleep(0.05)
            wire.detach()
            note_round(wire.members, ended=True)
            dist.barrier()
        except Exception as error:
            note(error=f"{type(error).__name__}: {error}")
            os._exit(1)
    os._exit(0)


class Sites:
    """Processes of sites, and what they have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._starts: dict[str, int] = {}
        self._processes: dict[tuple[str, int], Any] = {}

    def start(self, *names: str, kind: str, breaks_at: int = 0) -> None:
        """Both ranks of each site."""
        self._number += 1
        for name in names:
            self._starts[name] = self._number
            for rank in range(2):
                given = (self._folder, name, self._number, rank, kind, breaks_at)
                process = FORKED.Process(target=trained, args=given)
                process.start()
                self._processes[name, rank] = process

    def notes(self, name: str, rank: int) -> list[dict[str, Any]]:
        return notes_in(self._folder / f"{name}.{rank}.jsonl")

    def wait_for(self, name: str, rounds: int, members: tuple[str, ...] = ()) -> int:
        """Until the site's present process has landed a round of `members`, after `rounds` of them or more;
        the number of its last round.
        """
        until_s = time.monotonic() + GUARD_S
        while True:
            for each in self.notes(name, 0):
                is_it = each["start"] == self._starts[name] and each.get("rounds", -1) >= rounds
                if is_it and set(members) <= set(each["members"]):
                    return int(each["rounds"])
            assert time.monotonic() < until_s, f"{name} is at {self.notes(name, 0)[-1:]}"
            time.sleep(0.02)

    def kill(self, name: str, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self._processes[name, rank].pid, signal.SIGKILL)

    def code(self, name: str, rank: int) -> int | None:
        self._processes[name, rank].join(GUARD_S)
        code: int | None = self._processes[name, rank].exitcode
        return code

    def stop(self) -> None:
        (self._folder / STOP).touch()

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def check(self, *names: str) -> None:
        """Shared parameters are the same for all that have noted as many rounds, rank for rank."""
        for rank in range(2):
            found: dict[int, Any] = {}
            for name in names:
                for each in self.notes(name, rank):
                    if "rounds" in each and each["rounds"] > 0:
                        assert found.setdefault(each["rounds"], each["shared"]) == each["shared"]
            assert found


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.end()


def test_a_rank_that_fails_ends_its_own_site_in_words_and_the_other_goes_on(sites: Sites) -> None:
    sites.start("a", kind="ddp")
    sites.start("b", kind="ddp", breaks_at=3)
    assert [sites.code("b", rank) for rank in range(2)] == [1, 1]
    assert sites.notes("b", 1)[-1]["error"] == "MemoryError: no memory"
    assert "rank 1 could not bring what it has learned: MemoryError" in sites.notes("b", 0)[-1]["error"]
    sites.wait_for("a", sites.notes("b", 0)[-2]["rounds"] + 2)
    sites.stop()
    assert [sites.code("a", rank) for rank in range(2)] == [0, 0]
    assert sites.notes("a", 1)[-1]["ended"]
    sites.check("a", "b")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_site_whose_first_rank_is_killed_comes_back_and_the_whole_job_goes_on_from_the_folder(
    sites: Sites, kind: str
) -> None:
    sites.start("a", "b", kind=kind)
    last = sites.wait_for("a", 1, ("a", "b"))
    sites.kill("b", 0)
    assert sites.code("b", 1) == 1  # its second rank hears of it
    assert "error" in sites.notes("b", 1)[-1]
    sites.wait_for("a", last + 3)
    sites.start("b", kind=kind)  # a newcomer, all of whose ranks get the snapshot
    last = sites.wait_for("b", last + 4, ("a", "b"))
    for name in ("a", "b"):
        sites.kill(name, 0, 1)
        assert [sites.code(name, rank) for rank in range(2)] == [-signal.SIGKILL] * 2
    sites.start("a", "b", kind=kind)
    for name in ("a", "b"):
        sites.wait_for(name, last + 1, ("a", "b"))
    sites.stop()
    assert [sites.code(name, rank) for name in ("a", "b") for rank in range(2)] == [0] * 4
    sites.check("a", "b")
