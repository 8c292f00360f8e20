"""Ring, tree, star, direct: exact sums, the same bits everywhere, announced bytes and order of addition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2

import pytest
import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.comm.algorithms import ALL_REDUCES
from gradwire.comm.base import Algorithm
from gradwire.errors import RanksDisagree
from tests.support.looped import looped
from tests.unit.comm.hops.meter import messages

WORLDS = (1, 2, 3, 4, 5, 7, 8)
SIZES = (0, 1, 2, 3, 5, 7, 64, 1000)

every_algorithm = looped("algorithm", ALL_REDUCES)


def coded(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Position and rank: a misplaced or doubled part shows, and sums are exact even in bfloat16."""
    return ((torch.arange(size) % 13 + 1) * (rank % 3 + 1)).to(dtype)


def reduced(algorithm: Algorithm, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What every rank holds in the end."""

    def body(comm: ThreadComm) -> Tensor:
        tensor = inputs[comm.rank].clone()
        comm.all_reduce(tensor, algorithm).wait()
        return tensor

    return run_ranks(len(inputs), body)


@looped("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64])
@looped("world", WORLDS)
@every_algorithm
def test_sums_are_exact_for_integers(algorithm: Algorithm, world: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        inputs = [coded(rank, size, dtype) for rank in range(world)]
        expected = torch.stack(inputs).sum(0).to(dtype)
        for result in reduced(algorithm, inputs):
            assert torch.equal(result, expected), size


@looped("world", WORLDS)
@every_algorithm
def test_all_ranks_hold_the_same_bits(algorithm: Algorithm, world: int) -> None:
    draw = torch.Generator().manual_seed(world)
    inputs = [torch.randn(101, generator=draw) for _ in range(world)]
    for rank, x in enumerate(inputs):
        # NaNs with bits of their own: which one comes out depends on the order of addition.
        x.view(torch.int32)[17] = 0x7FC00001 + rank
        x[3] = torch.inf if rank % 2 else -torch.inf
    first, *rest = reduced(algorithm, inputs)
    assert first.isnan()[17]
    for other in rest:
        assert torch.equal(first.view(torch.int32), other.view(torch.int32))


def by_ring(inputs: Sequence[Tensor]) -> Tensor:
    """Part p from rank p on."""
    world, total = len(inputs), inputs[0].clone()
    for part, place in enumerate(torch.arange(inputs[0].numel()).tensor_split(world)):
        total[place] = inputs[part][place]
        for step in range(1, world):
            total[place] += inputs[(part + step) % world][place]
    return total


def by_tree(inputs: Sequence[Tensor]) -> Tensor:
    """Neighbours, then pairs of neighbours; who has none waits."""
    if len(inputs) == 1:
        return inputs[0]
    pairs = [inputs[i : i + 2] for i in range(0, len(inputs), 2)]
    return by_tree([pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs])


def by_star(inputs: Sequence[Tensor]) -> Tensor:
    """By rank."""
    total = inputs[0].clone()
    for other in inputs[1:]:
        total += other
    return total


ORDERS: dict[Algorithm, Callable[[Sequence[Tensor]], Tensor]] = {
    "ring": by_ring,
    "tree": by_tree,
    "star": by_star,
    "direct": by_star,
}


@looped("world", WORLDS)
@every_algorithm
def test_order_of_addition_is_the_documented_one(algorithm: Algorithm, world: int) -> None:
    # Magnitudes far apart: another order would round differently somewhere among 200 elements.
    draw = torch.Generator().manual_seed(7)
    inputs = [torch.randn(200, generator=draw) * 10.0 ** (rank % 4 * 3) for rank in range(world)]
    expected = ORDERS[algorithm](inputs)
    assert torch.equal(reduced(algorithm, inputs)[0], expected)
    if world > 3:
        others = [order(inputs) for order in {*ORDERS.values()} - {ORDERS[algorithm]}]
        assert not any(torch.equal(expected, other) for other in others)


@looped("world", WORLDS)
@every_algorithm
def test_bytes_are_those_of_the_round(algorithm: Algorithm, world: int) -> None:
    for size in (1, 3, 1000):
        sent = messages(world, lambda peers, size=size: ALL_REDUCES[algorithm](torch.zeros(size), peers))
        total = sum(4 * numel for rank in sent for _target, numel in rank)
        round_ = Round("all_reduce", size, torch.float32, algorithm=algorithm)
        assert total / world == pytest.approx(round_.wire_bytes(world), rel=1e-15)


@pytest.mark.parametrize("world", WORLDS)
def test_who_sends_how_much(world: int) -> None:
    size = 8 * 3 * 5 * 7  # divides evenly
    others, depth = world - 1, ceil(log2(world))

    def sent(algorithm: Algorithm) -> list[int]:
        found = messages(world, lambda peers: ALL_REDUCES[algorithm](torch.zeros(size), peers))
        return [sum(numel for _target, numel in rank) for rank in found]

    assert sent("ring") == [2 * others * size // world] * world
    assert sent("star") == [others * size, *[size] * others]
    assert sent("direct") == [others * size] * world
    assert sent("tree")[0] == depth * size
    assert max(sent("tree")) <= depth * size


@every_algorithm
def test_tensors_keep_their_shape_and_their_surroundings(algorithm: Algorithm) -> None:
    def body(comm: ThreadComm) -> Tensor:
        memory = torch.full((8, 3), float(comm.rank + 1))
        comm.all_reduce(memory[2:6], algorithm).wait()
        return memory

    for rank, memory in enumerate(run_ranks(3, body)):
        assert (memory[2:6] == 6.0).all()
        assert (memory[:2] == rank + 1.0).all()
        assert (memory[6:] == rank + 1.0).all()


def test_ranks_that_choose_different_algorithms_are_told() -> None:
    with pytest.raises(RanksDisagree, match="ranks issued different collectives"):
        run_ranks(2, lambda comm: comm.all_reduce(torch.zeros(1), ("ring", "tree")[comm.rank]))
