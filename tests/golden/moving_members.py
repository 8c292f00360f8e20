"""Scenes of members that come and go by a script: with an interface as torchft's, and in a folder."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire import members
from gradwire.members import Card, Roster
from gradwire.members.base import Entry
from tests.golden.given import Play, Row, Tell
from tests.golden.local_steps import Following, Replica

EVERY = 2


class Scripted:
    """`Members` who are there as a script says, for each question by its number."""

    address = "127.0.0.1"
    alone_s: float | None = None

    def __init__(self, name: str, store: dist.Store, script: Sequence[str], first: int = 0) -> None:
        """The names of those who ask, one letter each; this member's first question."""
        self.name, self.store, self.script, self.asked = name, store, script, first
        self.id = f"{name}{first}"

    def ask(self, card: Card) -> Roster:
        number, self.asked = self.asked, self.asked + 1
        there = self.script[number]
        assert self.name in there, "it would wait for others in vain"
        self.store.set(f"{number}/{self.name}", json.dumps([self.id, card.as_dict()]))
        entries = []
        for name in there:
            id_, told = json.loads(self.store.get(f"{number}/{name}"))
            entries.append(Entry(name, id_, Card.of(told)))
        return Roster(number + 1, tuple(entries))

    def close(self) -> None:
        """Nobody waits for it, by the script."""


class Member(Replica):
    """One member's loop: it has no state to ask for, but that of its shared parameters."""

    counts_bytes = True

    def say(self, moment: str) -> None:
        """Tell values and counts; bytes only where no round is under way, whose have been counted or not."""
        with self.wire.shared_parameters():
            shared = self.own()
        report = self.wire.report()
        sent = f"{report.rounds_committed} rounds, {report.rounds_lost} lost, {','.join(report.members)}"
        if self.counts_bytes:
            sent += f", {report.wire_bytes:.1f} bytes"
        self.tell(Row(moment, self.own(), sent, shared))


class Late(Member):
    """One whose rounds land later."""

    counts_bytes = False


class Stored(Late):
    """One of those that meet in a folder, of whose bytes some are heartbeats, which go by the clock."""


def _folder() -> Path:
    """A folder that all ranks know. It goes with that of the ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


COMES_AND_GOES = ("012", "012", "012", "01", "01", "012", "012", "02", "02")
"""All begin. In the second round the last member fails, and is back after one round without it. At last the
middle one leaves."""


def coming_and_going(text: str, tell: Tell, **options: Any) -> None:
    name, folder = str(dist.get_rank()), _folder()
    store = dist.FileStore(str(folder / "asked"), dist.get_world_size())

    def begun(first: int, seed: int) -> tuple[Scripted, Member]:
        asks = Scripted(name, store, COMES_AND_GOES, first)
        kind = Late if "delay" in options else Member
        return asks, kind(text, tell, Following(seed), every=EVERY, members=asks, **options)

    asks, member = begun(0, 7 + dist.get_rank())
    number = 0
    while asks.asked < len(COMES_AND_GOES):
        if (
            number == 3 and name == "2"
        ):  # its parameters are others than it began with, so it fails in a round
            member.model.register_parameter("strange", torch.nn.Parameter(torch.zeros(3)))
        try:
            member.step(number)
        except ValueError:
            tell(Row("fails"))
            del asks, member
            gc.collect()
            asks, member = begun(5, 70)
            member.say("is back")
        number += 1
        if asks.asked == 7 and name == "1":
            break
    member.wire.detach()
    tell(Row("leaves", member.own()))


def resumed(text: str, tell: Tell, **options: Any) -> None:
    """All are saved in the middle of a round, and go on from that."""
    name, folder = str(dist.get_rank()), _folder()
    store = dist.FileStore(str(folder / "asked"), dist.get_world_size())
    there = "01"[: dist.get_world_size()]
    for first, steps in ((0, range(5)), (3, range(5, 10))):
        asks = Scripted(name, store, [there] * 9, first)
        seed = 7 + first + dist.get_rank()
        saves = folder / f"saves of {name}"
        more = {"resume": saves} if first else {}
        kind = Late if "delay" in options else Member
        member = kind(text, tell, Following(seed), every=EVERY, members=asks, **options, **more)
        for number in steps:
            member.step(number, f"step {number} since {first}")
        if not first:
            member.wire.save(saves)
            dist.barrier()
        del member, asks
        gc.collect()
        dist.barrier()


def in_a_store(text: str, tell: Tell, **options: Any) -> None:
    """One is gone in the middle of its second round, and returns while the other waits for it."""
    folder, rank = _folder(), dist.get_rank()

    def begun(seed: int, **more: Any) -> Stored:
        stored = members.store(
            str(folder / "run"), f"site-{rank}", at_least=dist.get_world_size(), beat_s=2.0, snapshot_every=2
        )
        return Stored(text, tell, Following(seed), every=EVERY, members=stored, **options, **more)

    for first in range(dist.get_world_size()):  # the first one that is there begins
        if first == rank:
            member = begun(7)
        dist.barrier()
    for number in range(3):
        member.step(number)
    if rank:
        member.wire.save(folder / "saves")
        del member
        gc.collect()
        member = begun(70, resume=folder / "saves")
        member.say("is back")
    for number in range(3, 8):
        member.step(number)


RECIPES = ("diloco", "int4(block=33)", "topk(ratio=0.1)")

MEMBERS = {
    "members": Play(coming_and_going, RECIPES, (3,)),
    "members, late": Play(partial(coming_and_going, delay=1), RECIPES[1:], (3,)),
    "members, resumed": Play(resumed, RECIPES[1:], (2,)),
    "members, resumed, late": Play(partial(resumed, delay=1), RECIPES[1:], (2,)),
    "members in a store": Play(in_a_store, ("sparseloco", "topk(ratio=0.1)"), (2,)),
    "members in a store, late": Play(partial(in_a_store, delay=1), ("sparseloco",), (2,)),
}
