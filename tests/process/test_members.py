"""Real gloo ranks: rounds among members; a fixed set of them beside `replicas=`, by all kinds of recipes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire._api import connections
from gradwire.comm import ProcessGroupComm
from gradwire.measure.connections import tried
from gradwire.members import Card, Roster
from gradwire.members.standing import Fixed
from tests.support.local_steps import EVERY, ROUNDS, Run, steps, trained
from tests.support.models import perceptron
from tests.support.tiers import cases
from tests.support.world import Ranks

pytestmark = pytest.mark.process

LOOK, LOOKS = 4, 12
"""Rounds from one look at losses to the next, and looks."""


class Anew(Fixed):
    """Members that stay, and connect anew before a round where they are told to."""

    is_broken = False

    def ask(self, card: Card) -> Roster:
        return super().ask(replace(card, meeting="") if self.is_broken else card)


class AlwaysAnew(Anew):
    """Members that connect anew before each round."""

    is_broken = True


def plain(recipe: str, delay: int, kind: type[Fixed] = Fixed) -> tuple[Run, Run]:
    """Two replicas of a rank each; as ranks of a group, and as members of a `kind`."""
    group, rank = dist.group.WORLD, dist.get_rank()
    one = trained(perceptron(rank), recipe, delay, replicas=group)
    return one, trained(perceptron(rank), recipe, delay, members=kind(group, "127.0.0.1"))


def inside(kind: str, recipe: str, delay: int) -> tuple[Run, Run]:
    """Two replicas of two ranks each, by DDP or FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    replica = mesh.get_local_rank("replicas")

    def made() -> nn.Module:
        module = perceptron(replica)
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("ranks"))
        fully_shard(module, mesh=mesh["ranks"])
        return module

    one = trained(made(), recipe, delay, replicas=mesh["replicas"])
    members = gradwire.members.fixed(mesh["replicas"], address="127.0.0.1")
    return one, trained(made(), recipe, delay, members=members)


def _check(found: list[tuple[Run, Run]]) -> None:
    for replicas, members in found:
        assert members == replicas
        assert len(set(members.held)) > 2, "it learns"
        assert members.rounds == ROUNDS
        assert members.sent_bytes == ROUNDS * members.bytes_by_round > 0


RECIPES = ("diloco", "int4", "sparseloco", "powersgd(rank=2)", "topk(ratio=0.1)")
PLAIN = [(recipe, delay) for recipe in RECIPES for delay in (0, 2)]
INSIDE = [(kind, recipe, delay) for kind in ("ddp", "fsdp") for recipe in RECIPES[:2] for delay in (0, 2)]


@pytest.mark.parametrize(("recipe", "delay"), cases(PLAIN, but=[("int4", 0), ("sparseloco", 2)]))
def test_members_that_stay_take_the_rounds_of_replicas_bit_for_bit(
    two: Ranks, recipe: str, delay: int
) -> None:
    _check(two(plain, recipe, delay))


@pytest.mark.parametrize(("recipe", "delay"), [("topk(ratio=0.1)", 0), ("powersgd(rank=2)", 2)])
def test_what_is_unsent_and_what_was_sent_go_along_to_a_fresh_meeting(
    two: Ranks, recipe: str, delay: int
) -> None:
    _check(two(plain, recipe, delay, AlwaysAnew))


@pytest.mark.parametrize(("kind", "recipe", "delay"), cases(INSIDE, but=[("ddp", "int4", 0)]))
def test_members_of_two_ranks_take_the_rounds_of_replicas_bit_for_bit(
    four: Ranks, kind: str, recipe: str, delay: int
) -> None:
    _check(four(inside, kind, recipe, delay))


@dataclass(frozen=True)
class Meetings:
    """Open files and threads after each round, and what a run of many meetings has come to."""

    files: list[int]
    threads: list[int]
    overlap: bool
    rounds: int
    measured: int


def anew() -> Meetings:
    """Rounds, each but the first in another meeting."""
    members, model = Anew(dist.group.WORLD, "127.0.0.1"), perceptron(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    files, threads = list[int](), list[int]()
    # All links are taken to be long ones, which are measured by large messages.
    with (
        patch("gradwire.measure.connections.LONG_S", 0.0),
        patch.object(connections, "tried", Mock(wraps=tried)),
    ):
        wire = gradwire.outer(model, optimizer, "int4", every=1, members=members)
        wire.overlap, members.is_broken = False, True
        for step in range(9):
            steps(model, optimizer, [step])
            dist.barrier()
            files.append(len(os.listdir("/proc/self/fd")))
            threads.append(len(os.listdir("/proc/self/task")))
        return Meetings(files, threads, wire.overlap, wire.rounds, connections.tried.call_count)


def test_a_meeting_leaves_nothing_behind_and_settings_stay_and_links_are_measured_once(two: Ranks) -> None:
    for found in two(anew):
        assert (found.overlap, found.rounds, found.measured) == (False, 9, 1)
        assert found.files[-1] <= found.files[1] + 1
        assert found.threads[-1] <= found.threads[1] + 1


def questions() -> list[int]:
    """Collectives of each of six rounds over long links, the last three of which are in fresh meetings."""
    members, model = Anew(dist.group.WORLD, "127.0.0.1"), perceptron(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    issue, counts = ProcessGroupComm.issue, [0]

    def counting(self: ProcessGroupComm, *round_: Any) -> Any:
        counts[-1] += self.world > 1
        return issue(self, *round_)

    with (
        patch("gradwire.measure.connections.LONG_S", 0.0),
        patch("gradwire._api.connections.LONG_S", 0.0),
        patch.object(ProcessGroupComm, "issue", counting),
    ):
        gradwire.outer(model, optimizer, "int4", every=1, members=members)
        for step in range(6):
            members.is_broken = step >= 3
            counts.append(0)
            steps(model, optimizer, [step])
    return counts[1:]


def test_a_fresh_meeting_compares_all_that_ranks_must_agree_on_in_one_question(two: Ranks) -> None:
    for counts in two(questions):
        assert max(counts[3:]) == max(counts[:3]) + 1


def paced(every_seconds: float) -> int:
    """Rounds in five times as many steps as the first one takes."""
    members, model = gradwire.members.fixed(dist.group.WORLD, address="127.0.0.1"), perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    how: dict[str, Any] = {"every": EVERY, "every_seconds": every_seconds, "members": members}
    wire = gradwire.outer(model, optimizer, "diloco", **how)
    steps(model, optimizer, range(5 * EVERY))
    return wire.rounds


def test_rounds_by_time_come_after_as_many_steps_as_fit(two: Ranks) -> None:
    assert two(paced, 1e9) == [1, 1]
    assert two(paced, 1e-9) == [1 + 4 * EVERY] * 2


def losses_that_rise() -> list[str]:
    """Signs that losses have risen, where the roster has changed just before."""
    members, model = Anew(dist.group.WORLD, "127.0.0.1"), perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with patch("gradwire.control.controller.EVERY", LOOK):
        wire = gradwire.outer(model, optimizer, "topk(ratio=0.5)", every=1, members=members)
        for step in range(LOOKS * LOOK + 1):
            members.is_broken = step == (LOOKS - 2) * LOOK
            wire.note_loss(2.0 if step > (LOOKS - 2) * LOOK else 1.0)
            steps(model, optimizer, [step])
    return [sign for _step, sign in wire.report().health]


@pytest.mark.rest
def test_losses_that_rise_are_compared_with_those_before_the_roster_changed(two: Ranks) -> None:
    for signs in two(losses_that_rise):
        assert signs == ["the loss has risen from 1 to 2"]
