"""Real gloo ranks: rounds over a folder beside those of a group; sites that start, leave and fail."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.members.bucket import meet, member
from tests.process.stored_job import check_that_no_kill_costs_a_sealed_round
from tests.support.bits import Checksums, checksums
from tests.support.local_steps import ROUNDS, Run, common_folder, shared, steps, trained, values
from tests.support.models import SHAPE, perceptron
from tests.support.raised import raised
from tests.support.tiers import cases
from tests.support.world import Ranks

pytest.importorskip("obstore")
pytestmark = pytest.mark.process


class Normed(nn.Module):
    """A perceptron with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(0)
        self.norm = nn.BatchNorm1d(SHAPE[0])

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(self.norm(inputs))
        return found


def beside(recipe: str, delay: int, make: type[nn.Module] | Any = perceptron) -> tuple[Run, Run]:
    """Replicas of one rank each: as ranks of a group, and as members that meet in a folder.

    All begin with equal parameters: over a store the first one that is there begins.
    """
    folder, rank = common_folder(), dist.get_rank()
    one = trained(make(), recipe, delay, rank, replicas=dist.group.WORLD)
    members = gradwire.members.store(folder, f"site-{rank}", at_least=dist.get_world_size(), beat_s=2.0)
    return one, trained(make(), recipe, delay, rank, members=members)


def inside(kind: str, recipe: str, delay: int, make: type[nn.Module] | Any = perceptron) -> tuple[Run, Run]:
    """Two sites of two ranks each over a folder, beside replicas in a group. By DDP those have one rank: it
    has the data of both ranks of a site, which are the same.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    folder, replica, place = common_folder(), mesh.get_local_rank("replicas"), mesh.get_local_rank("ranks")
    data = replica if kind == "ddp" else dist.get_rank()
    model = make()
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh["ranks"])
    one = trained(model, recipe, delay, data, replicas=mesh["replicas"])
    dist.barrier()
    dist.destroy_process_group()
    store = f"file://{folder}/{replica}.store"
    dist.init_process_group("gloo", init_method=store, rank=place, world_size=2)
    model = make()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    members = gradwire.members.store(f"{folder}/run", f"site-{replica}", at_least=2, beat_s=2.0)
    other = trained(model, recipe, delay, data, members=members)
    dist.barrier()  # a rank that leaves would end the other's group
    return one, other


def _check(found: list[tuple[Run, Run]], atol: float = 0.0) -> None:
    for replicas, members in found:
        assert members.held == replicas.held
        assert members.buffers == pytest.approx(replicas.buffers, rel=0.0, abs=atol)
        assert len(set(members.held)) >= ROUNDS, "each round moves it"


RECIPES = ("sparseloco", "topk(ratio=0.1)", "int4(collective='all_gather')", "int8(collective='all_gather')")
BESIDE = list(product((*RECIPES, "onebit", "diloco"), (0, 2)))
INSIDE = list(product(("ddp", "fsdp2"), ("sparseloco", "int4(collective='all_gather')", "diloco"), (0, 2)))


@pytest.mark.parametrize(("recipe", "delay"), cases(BESIDE, but=[("sparseloco", 0)]))
def test_rounds_over_a_folder_are_those_of_replicas_bit_for_bit(two: Ranks, recipe: str, delay: int) -> None:
    _check(two(beside, recipe, delay))


@pytest.mark.rest
@pytest.mark.parametrize("recipe", RECIPES)
def test_so_are_those_of_three(three: Ranks, recipe: str) -> None:
    _check(three(beside, recipe, 0))


@pytest.mark.parametrize(("kind", "recipe", "delay"), cases(INSIDE, but=[("fsdp2", "sparseloco", 0)]))
def test_sites_of_two_ranks_take_the_rounds_of_replicas_bit_for_bit(
    four: Ranks, kind: str, recipe: str, delay: int
) -> None:
    _check(four(inside, kind, recipe, delay))


@pytest.mark.rest
def test_buffers_are_averaged_as_those_of_replicas(two: Ranks, four: Ranks) -> None:
    _check(two(beside, "diloco", 0, Normed))
    _check(four(inside, "ddp", "diloco", 0, Normed))
    # Buffers of four ranks are added up in another order: those of a site first.
    _check(four(inside, "fsdp2", "diloco", 0, Normed), atol=1e-6)


def _site(
    model: nn.Module, folder: str, name: str = "a", who: dict[str, Any] | None = None, **options: Any
) -> tuple[gradwire.OuterWire, torch.optim.Optimizer]:
    """The wire of a site, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members = gradwire.members.store(f"{folder}/run", name, **{"at_least": 1, "beat_s": 2.0} | (who or {}))
    given = {"every": 2, "recipe": "topk(ratio=0.2)"} | options
    return gradwire.outer(model, optimizer, members=members, **given), optimizer


@dataclass(frozen=True)
class Alone:
    """A site before another one is there, and after their first round."""

    rounds: int
    attempts: int
    events: list[str]
    rounds_after: int
    members: list[str]
    committed: int
    steps_beside: int


def alone_and_another() -> Alone:
    """A site of both ranks trains alone until there is one of a single rank, on its first rank."""
    folder, model, other = common_folder(), DistributedDataParallel(perceptron(0)), perceptron(0)
    with patch.object(meet, "ALONE_S", 0.1):
        wire, optimizer = _site(model, folder, who={"at_least": 2, "alone": "train"})
    steps(model, optimizer, range(7))
    before = wire.rounds, wire.attempts, [each.what for each in wire.events]
    if dist.get_rank() == 0:
        another, own = _site(other, folder, "b", {"at_least": 2})
        steps(other, own, range(2))
        another.detach()
    beside = 0
    while not wire.rounds:
        time.sleep(0.05)  # its seal is read beside training
        steps(model, optimizer, [0])
        beside += 1
    found = Alone(*before, wire.rounds, list(wire.members), wire.report().rounds_committed, beside)
    wire.detach()
    return found


@pytest.mark.rest
def test_a_site_of_two_ranks_trains_alone_until_one_of_a_single_rank_is_there(two: Ranks) -> None:
    for found in two(alone_and_another):
        assert (found.rounds, found.attempts, found.events) == (0, 7, ["alone"])
        assert (found.rounds_after, found.members, found.committed) == (1, ["a", "b"], 1)
        assert found.steps_beside > 0


def paced() -> list[int]:
    """Attempted steps after each round by time, of ranks with other clocks: 1/8 s or 10 s a step."""
    clock, at, step_s = [0.0], list[int](), 0.125 if dist.get_rank() == 0 else 10.0
    model = DistributedDataParallel(perceptron(0))
    with patch.object(member, "now_s", lambda: clock[0]):
        wire, optimizer = _site(model, common_folder(), every_seconds=1.0)
        for _ in range(18):
            clock[0] += step_s
            steps(model, optimizer, [0])
            at += [wire.attempts] if wire.rounds > len(at) else []
        wire.detach()
    return at


def test_the_first_rank_of_a_site_decides_when_rounds_by_time_come(two: Ranks) -> None:
    assert two(paced) == [[2, 10, 18]] * 2


@dataclass(frozen=True)
class Refused:
    """What ranks of a site raise whose arguments differ in one thing."""

    every: str
    name: str
    recipe: str


def asked_otherwise() -> Refused:
    """Training goes on without a wire."""
    rank = dist.get_rank()

    def refusal(name: str = "a", every: int = 2, recipe: str = "topk(ratio=0.2)") -> str:
        model = DistributedDataParallel(perceptron(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        members = gradwire.members.store(f"{common_folder()}/run", name, at_least=1)
        heard = raised(partial(gradwire.outer, model, optimizer, recipe, every=every, members=members))
        steps(model, optimizer, range(2))
        return str(heard)

    return Refused(
        every=refusal(every=2 + rank),
        name=refusal(f"site-{rank}"),
        recipe=refusal(recipe="int4" if rank else "topk(ratio=0.2)"),
    )


def test_ranks_of_a_site_that_were_asked_otherwise_are_refused_together(two: Ranks) -> None:
    found = two(asked_otherwise)
    for each in found:
        assert re.match(r"RanksDisagree: ranks disagree on every: rank 0: 2 .*; rank 1: 3 ", each.every)
        assert re.match(
            r"RanksDisagree: ranks disagree on name: rank 0: site-0 .*; rank 1: site-1 ", each.name
        )
        assert "int4(block=128, feedback=True, collective='all_reduce') needs several" in each.recipe
    assert [each.recipe.partition(":")[0] for each in found] == ["PeerFailed", "ValueError"]


def named_twice() -> str:
    """What all ranks of a site raise when another process takes its name."""
    folder, model, other = common_folder(), DistributedDataParallel(perceptron(0)), perceptron(0)
    wire, optimizer = _site(model, folder)
    if dist.get_rank() == 0:
        _site(other, folder)[0].detach()
    dist.barrier()
    heard = raised(partial(steps, model, optimizer, range(2)))
    wire.detach()
    return str(heard)


@pytest.mark.rest
def test_all_ranks_of_a_site_hear_that_another_process_has_its_name(two: Ranks) -> None:
    for heard in two(named_twice):
        assert heard.startswith("GradwireError: another process has taken the name 'a' of this replica")


@dataclass(frozen=True)
class Held:
    """What a site holds, and the rounds that it counts."""

    shared: Checksums
    own: Checksums
    rounds: int


@dataclass(frozen=True)
class Saved:
    """A site when it was saved and when it goes on from there, two steps later, and one without a save."""

    saved: Held
    resumed: Held
    later: Held
    from_the_folder: Held


def saved() -> Saved:
    """By FSDP2."""
    folder, mesh = common_folder(), init_device_mesh("cpu", (2,))

    def made(seed: int, **options: Any) -> tuple[nn.Module, gradwire.OuterWire, torch.optim.Optimizer]:
        model = perceptron(seed)
        fully_shard(model, mesh=mesh)
        return model, *_site(model, folder, **options)

    def held(model: nn.Module, wire: gradwire.OuterWire) -> Held:
        return Held(checksums(shared(wire, model)), checksums(values(model)), wire.rounds)

    model, wire, optimizer = made(0)
    steps(model, optimizer, range(4))
    wire.save(f"{folder}/saves")
    before = held(model, wire)
    wire.detach()
    model, wire, optimizer = made(1, resume=f"{folder}/saves")
    resumed = held(model, wire)
    steps(model, optimizer, range(2))
    later = held(model, wire)
    wire.detach()
    model, wire, _optimizer = made(2)
    fresh = held(model, wire)
    wire.detach()
    return Saved(before, resumed, later, fresh)


@pytest.mark.rest
def test_a_site_by_fsdp2_goes_on_from_its_save_and_from_the_folder_alone(two: Ranks) -> None:
    for found in two(saved):
        assert found.resumed == found.saved
        assert found.later.rounds == found.from_the_folder.rounds == 3
        assert found.from_the_folder.shared == found.later.shared != found.saved.shared


def refused(recipe: str) -> str:
    """By a site of one rank."""
    return str(raised(partial(_site, perceptron(), common_folder(), recipe=recipe)))


@pytest.mark.parametrize("recipe", ["int4", "powersgd(rank=2)", "leader_topk(ratio=0.1)", "threshold"])
def test_recipes_whose_replicas_answer_each_other_are_refused_in_words(two: Ranks, recipe: str) -> None:
    for heard in two(refused, recipe):
        assert "ValueError: " in heard
        assert "take one in which each replica's payload is made without the others" in heard


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_kills_and_newcomers_cost_no_sealed_round_and_a_job_goes_on_from_the_folder(tmp_path: Path) -> None:
    check_that_no_kill_costs_a_sealed_round(str(tmp_path / "run"), tmp_path)
