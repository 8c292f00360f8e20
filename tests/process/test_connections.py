"""Several connections between real gloo ranks: no bit depends on how many there are."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.comm import ProcessGroupComm
from gradwire.comm.ahead import Receive
from gradwire.comm.algorithms import ring_all_gather
from gradwire.comm.groups import borrow, give_back, lent
from gradwire.environment import CONNECTIONS
from gradwire.measure.connections import Tried
from tests.support.models import digest
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

SIZES = (0, 1, 5, 16_385, 70_001, 1_400_003)
Nodes = tuple[tuple[int, ...], ...]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of many magnitudes, so that another order of addition shows."""
    random = torch.Generator().manual_seed(7 * size + rank)
    scale = 2.0 ** torch.randint(-8, 4, (size,), generator=random)
    return (torch.randn(size, generator=random) * scale).to(dtype)


def results(comm: ProcessGroupComm) -> Iterator[Tensor]:
    """What this rank has of many collectives, several of which are under way at once."""
    for dtype, size in product(DTYPES, SIZES):
        mine = drawn(comm.rank, size, dtype)
        total, ring, passed = mine.clone(), mine.clone(), torch.empty_like(mine)
        gathered = mine.new_empty(comm.world, size)
        rows = torch.stack([mine + to for to in range(comm.world)])
        received = torch.empty_like(rows)
        pending = [
            comm.all_reduce(total),
            comm.all_gather(gathered, mine),
            comm.shift(passed, mine),
            comm.all_reduce(ring, "ring"),
            comm.all_to_all(received, rows),
        ]
        for each in pending if comm.rank % 2 else reversed(pending):
            each.wait()
        yield from (total, gathered, passed, ring, received)


@dataclass(frozen=True)
class Results:
    """Hashes of what collectives leave, by the number of connections."""

    one: tuple[str, ...]
    three: tuple[str, ...]
    five: tuple[str, ...]


def by_connections() -> Results:
    """The same collectives over one, three and five."""
    assert dist.group.WORLD is not None
    comm = ProcessGroupComm(dist.group.WORLD)
    groups = [borrow(dist.group.WORLD) for _ in range(4)]

    def hashes() -> tuple[str, ...]:
        return tuple(
            hashlib.sha256(each.view(torch.uint8).numpy().tobytes()).hexdigest() for each in results(comm)
        )

    one, more = hashes(), []
    for further in (2, 4):
        comm.spread(groups[:further])
        more.append(hashes())
    comm.close()
    for group in groups:
        give_back(group)
    return Results(one, *more)


@dataclass(frozen=True)
class Trained:
    """Three steps."""

    digest: str
    connections: int
    """As the report has them."""
    groups: int
    """That torch knows afterwards."""


def trained(connections: str, nodes: Nodes | str | None = None, recipe: str = "dense") -> Trained:
    """With so many connections, as the environment names them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.Tanh(), nn.Linear(700, 10))
    with mock.patch.dict(os.environ, {CONNECTIONS: connections}):
        wire = gradwire.attach(
            ddp := nn.parallel.DistributedDataParallel(model),
            optimizer := torch.optim.SGD(model.parameters(), 0.1),
            recipe,
            nodes=nodes,
        )
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    report = wire.report()
    wire.detach()
    return Trained(digest(model), report.connections, len(dist.distributed_c10d._world.pg_names))


def trained_in_turn(nodes: Nodes | None) -> list[Trained]:
    """With one connection, with three, and with three again, over the same ranks."""
    return [trained(connections, nodes) for connections in ("1", "3", "3")]


def refused() -> list[str]:
    """What ranks raise where they were told different numbers, and no number."""
    told = []
    for text in (str(2 + dist.get_rank()), "many"):
        try:
            trained(text)
        except (ValueError, gradwire.RanksDisagree) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@dataclass(frozen=True)
class Run:
    """A training, on a link that counts as long or not."""

    recipe: str
    is_long: bool
    digest: str
    receives: int
    """That were announced ahead."""


def runs_over_the_same_groups(recipes: tuple[str, ...]) -> list[Run]:
    """With each recipe: on a short link with one connection, then on a long one with one and with three."""
    found = []
    for recipe in recipes:
        for long_s, connections in ((math.inf, "1"), (0.0, "1"), (0.0, "3")):
            with (
                mock.patch("gradwire.comm.ahead.Receive", wraps=Receive) as receives,
                mock.patch("gradwire._api.connections.LONG_S", long_s),
            ):
                run = trained(connections, recipe=recipe)
            found.append(Run(recipe, long_s == 0.0, run.digest, receives.call_count))
    return found


@dataclass(frozen=True)
class Held:
    """Memory of receives for which nobody waits: tensors."""

    while_attached: int
    in_the_end: int


def held() -> Held:
    """While a model is attached, and once it has gone."""
    announced: list[weakref.ref[Tensor]] = []
    receive = dist.irecv

    def noted(tensor: Tensor, **options: Any) -> Any:
        announced.append(weakref.ref(tensor))
        return receive(tensor, **options)

    def alive() -> int:
        gc.collect()
        return sum(each() is not None for each in announced)

    with mock.patch("gradwire._api.connections.LONG_S", 0.0), mock.patch.object(dist, "irecv", noted):
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(200, 50))
        wire = gradwire.attach(ddp, recipe="int8")
        for _ in range(4):
            ddp(torch.ones(2, 200)).sum().backward()
        while_attached = alive()
        wire.detach()
        del wire, ddp
        for _ in range(100):
            if alive() == 0:
                break
            time.sleep(0.05)
    return Held(while_attached, alive())


@dataclass(frozen=True)
class Gathered:
    """Training on a long link."""

    in_a_ring: bool
    digest: str


def gathered(per_node: str) -> Gathered:
    """With so many ranks on each node."""
    with (
        mock.patch("gradwire._api.connections.LONG_S", 0.0),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": per_node}),
        mock.patch("gradwire.comm.process_group.ring_all_gather", wraps=ring_all_gather) as ring,
    ):
        found = trained("1", "auto", "topk(ratio=0.001)")
    return Gathered(ring.called, found.digest)


def lent_of_tried(count: int) -> int:
    """Groups that a model has which tries so many connections and is as fast with one."""

    def in_vain(over: Callable[[int], object], _control: object) -> Tried:
        over(count)
        return Tried(round_trip_s=0.0, payload_bytes=0, times_s={}, connections=1)

    with (
        mock.patch("gradwire._api.connections.connections_asked", return_value=None),
        mock.patch("gradwire._api.connections.tried", in_vain),
    ):
        wire = gradwire.attach(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)), recipe="dense")
    number = len(lent())
    wire.detach()
    return number


def test_connections_that_gain_nothing_are_left_to_the_next_model(two: Ranks) -> None:
    assert two(lent_of_tried, 3) == two(lent_of_tried, 1)


def require_same(ranks: list[list[Trained]]) -> None:
    """On each rank the bits of one connection, the number that was asked for, and no further groups."""
    for one, three, again in ranks:
        assert three.digest == one.digest
        assert (three.connections, again.connections) == (3, 3)
        assert again.groups == three.groups


@pytest.mark.parametrize("world", rest([2, 3], but=[2]))
def test_no_bit_depends_on_the_number_of_connections(world: int, tmp_path: Path) -> None:
    ranks = Ranks(world, tmp_path)
    for found in ranks(by_connections):
        assert len(found.one) == 5 * len(DTYPES) * len(SIZES)
        assert found.three == found.one
        assert found.five == found.one
    require_same(ranks(trained_in_turn, None))
    for differ, no_number in ranks(refused):
        assert differ.startswith("RanksDisagree")
        assert "GRADWIRE_CONNECTIONS" in differ
        assert no_number.startswith("ValueError: GRADWIRE_CONNECTIONS='many'")


@pytest.mark.rest
@pytest.mark.parametrize("world", [2, 3])
def test_no_bit_depends_on_when_receives_are_announced(world: int, tmp_path: Path) -> None:
    ranks = Ranks(world, tmp_path)
    for found in ranks(held):
        assert found.while_attached > 0
        assert found.in_the_end == 0
    recipes = ("dense", "int8", "topk(ratio=0.05)", "powersgd(rank=2)", "gcomp", "dense", "int8")
    for runs in ranks(runs_over_the_same_groups, recipes):
        assert [run.recipe for run in runs] == [recipe for recipe in recipes for _ in range(3)]
        usual = {run.recipe: run.digest for run in runs if not run.is_long}
        assert [run for run in runs if run.digest != usual[run.recipe]] == []
        assert [run for run in runs if (run.receives > 3) != run.is_long] == []
        assert all(run.receives == 0 for run in runs if not run.is_long)


def test_links_between_nodes_take_several_connections_too(tmp_path: Path) -> None:
    require_same(Ranks(4, tmp_path)(trained_in_turn, ((0, 1), (2, 3))))


def test_what_ranks_gather_crosses_a_long_link_of_their_node_once(tmp_path: Path) -> None:
    four = Ranks(4, tmp_path)
    for alone, together in zip(four(gathered, "1"), four(gathered, "2"), strict=True):
        assert not alone.in_a_ring
        assert together.in_a_ring
        assert together.digest == alone.digest
