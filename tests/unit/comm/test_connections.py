"""Messages in stripes over several connections: whole, in order, and with the bits of one connection."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import ProcessGroupComm, ahead
from gradwire.comm.algorithms import ALL_REDUCES, STRIPE_BYTES
from gradwire.comm.base import DONE

T = TypeVar("T")

SIZES = (0, 1, 7, STRIPE_BYTES // 2, STRIPE_BYTES // 2 + 1, 3 * STRIPE_BYTES // 4 + 5, 70_001)
"""Elements of four bytes: of no stripe, of one, and of more, on both sides of the border."""
LONG = 100_003
SEVERAL = (2, 3, 8)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class _Group:
    """A process group as one rank has it: `number` is the same on all ranks."""

    def __init__(self, number: int, rank: int, world: int) -> None:
        self.number, self._rank, self._world = number, rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


class _Wires:
    """What c10d does with messages: those between two ranks of a group and with one tag keep their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, ...], list[Tensor]] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()
        self.by_group: Counter[int] = Counter()

    def isend(self, tensor: Tensor, group: _Group, group_dst: int, tag: int) -> Any:
        with self._changed:
            self.by_group[group.number] += 1
            key = (group.number, group.rank(), group_dst, tag)
            self._sent.setdefault(key, []).append(as_bytes(tensor).clone())
            self._changed.notify_all()
        return DONE

    def irecv(self, out: Tensor, group: _Group, group_src: int, tag: int) -> Any:
        key = (group.number, group_src, group.rank(), tag)
        place, self._asked[key] = self._asked[key], self._asked[key] + 1  # only this rank's thread asks
        wires = self

        class Coming:
            def wait(self) -> None:
                with wires._changed:
                    assert wires._changed.wait_for(lambda: len(wires._sent.get(key, ())) > place, 30)
                    as_bytes(out).copy_(wires._sent[key][place])

        return Coming()


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> _Wires:
    made = _Wires()
    monkeypatch.setattr(dist, "isend", made.isend)
    monkeypatch.setattr(dist, "irecv", made.irecv)
    return made


def on_ranks(
    world: int, connections: int, body: Callable[[ProcessGroupComm], T], announces: bool = False
) -> list[T]:
    def rank_main(rank: int) -> T:
        groups = [cast("dist.ProcessGroup", _Group(number, rank, world)) for number in range(connections)]
        comm = ProcessGroupComm(groups[0])
        comm.spread(groups[1:])
        comm.announce(ahead.ReceiveSeries(0) if announces else None)
        try:
            return body(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank_main, range(world)))


def numbers(rank: int, size: int) -> Tensor:
    """Of many magnitudes, so that another order of addition shows."""
    random = torch.Generator().manual_seed(7 * size + rank)
    return torch.randn(size, generator=random) * 2.0 ** torch.randint(-20, 4, (size,), generator=random)


@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize("connections", [1, *SEVERAL])
def test_messages_of_any_length_arrive_whole_and_in_order(
    connections: int, announces: bool, wires: _Wires
) -> None:
    lengths = [*SIZES, *reversed(SIZES), *SIZES[::2]]

    def body(comm: ProcessGroupComm) -> list[Tensor]:
        came = [torch.full((size,), torch.nan) for size in lengths]
        pending = [
            comm.shift(out, numbers(comm.rank, place + out.numel())[: out.numel()])
            for place, out in enumerate(came)
        ]
        for each in reversed(pending) if comm.rank % 2 else pending:
            each.wait()
        return came

    for rank, came in enumerate(on_ranks(3, connections, body, announces)):
        for place, (size, message) in enumerate(zip(lengths, came, strict=True)):
            assert torch.equal(message, numbers((rank - 1) % 3, place + size)[:size])


CHANGES: dict[str, tuple[int, int, Callable[[ProcessGroupComm], None]]] = {
    # among how many ranks, of how many elements
    "more connections": (
        3, LONG, lambda comm: comm.spread([cast("dist.ProcessGroup", _Group(1, comm.rank, 3))]),
    ),
    "receives announced ahead": (3, LONG, lambda comm: comm.announce(ahead.ReceiveSeries(0))),
    "a slow link": (2, 7, lambda comm: comm.expect(1.0)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_round_goes_another_way_than_those_like_it_before_a_change(
    change: str, wires: _Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, size, changes = CHANGES[change]
    for name in ("gradwire.comm.process_group._all_gather_flat", "torch.distributed.all_to_all_single"):
        monkeypatch.setattr(name, lambda *_, **__: DONE)

    def body(comm: ProcessGroupComm) -> Tensor:
        out = torch.zeros(world, size)
        comm.all_gather(out, numbers(comm.rank, size)).wait()
        assert not out[1 - comm.rank].any(), "the library has it, which does nothing here"
        changes(comm)
        comm.all_gather(out, numbers(comm.rank, size)).wait()
        return out

    all_of_them = torch.stack([numbers(rank, size) for rank in range(world)])
    assert all(torch.equal(out, all_of_them) for out in on_ranks(world, 1, body))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("connections", SEVERAL)
def test_hops_leave_the_bits_of_one_connection(world: int, connections: int, wires: _Wires) -> None:
    def body(comm: ProcessGroupComm) -> list[Tensor]:
        comm.expect(1.0)  # on so slow a link no message is short, and the library carries none
        results = []
        for size in SIZES[1:]:
            for algorithm in ALL_REDUCES:
                results.append(numbers(comm.rank, size))
                comm.all_reduce(results[-1], algorithm).wait()
            results.append(numbers(comm.rank, size))
            comm.broadcast(results[-1], world - 1, "scatter").wait()
        return results

    one, several = (on_ranks(world, count, body) for count in (1, connections))
    for announced in (several, on_ranks(world, connections, body, announces=True)):
        for mine, others in zip(one, announced, strict=True):
            assert all(torch.equal(first, second) for first, second in zip(mine, others, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("connections", SEVERAL)
@pytest.mark.parametrize("announces", [False, True])
def test_gathers_and_all_to_alls_bring_every_row(
    world: int, connections: int, announces: bool, wires: _Wires
) -> None:
    def body(comm: ProcessGroupComm) -> tuple[Tensor, Tensor]:
        gathered, received = torch.empty(world, LONG), torch.empty(world, LONG)
        for _ in range(3):
            pending = [
                comm.all_gather(gathered.zero_(), numbers(comm.rank, LONG)),
                comm.all_to_all(
                    received.zero_(),
                    torch.stack([numbers(comm.rank + 9 * to, LONG) for to in range(world)]),
                ),
            ]
            for each in pending:
                each.wait()
        return gathered, received

    for rank, (gathered, received) in enumerate(on_ranks(world, connections, body, announces)):
        assert torch.equal(gathered, torch.stack([numbers(each, LONG) for each in range(world)]))
        owed = [numbers(sender + 9 * rank, LONG) for sender in range(world)]
        assert torch.equal(received, torch.stack(owed))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("size", [LONG, 1_200_007])
def test_long_sums_add_in_gloos_order(world: int, size: int, wires: _Wires) -> None:
    def body(comm: ProcessGroupComm) -> Tensor:
        tensor = numbers(comm.rank, size)
        comm.all_reduce(tensor).wait()
        return tensor

    segments = max(2, -(-4 * size // (world * 2**20)))
    part = -(-size // (segments * world)) * segments
    expected = torch.empty(size)
    for owner in range(world):
        here = slice(owner * part, (owner + 1) * part)
        total = numbers((owner - 1) % world, size)[here]
        for back in range(2, world + 1):
            total = total + numbers((owner - back) % world, size)[here]
        expected[here] = total
    for result in on_ranks(world, 4, body):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("size", "used"), [(SIZES[3] // 2, 1), (2 * SIZES[3], 4), (8 * SIZES[3], 4)])
def test_only_what_is_long_takes_several_connections(size: int, used: int, wires: _Wires) -> None:
    def body(comm: ProcessGroupComm) -> None:
        comm.shift(torch.empty(size), torch.zeros(size)).wait()

    on_ranks(2, 4, body)
    assert wires.by_group == Counter(dict.fromkeys(range(used), 2))
