"""Buffers on their way: what is packed, what lands, and when DDP is spared its own broadcast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.comm import Comm, run_ranks
from gradwire.errors import PeerFailed
from gradwire.placement import BufferTransfer, HostDevice
from gradwire.sources.buffers import BufferBroadcast
from gradwire.sources.ddp.buffers import Buffers
from tests.support.rig import Rig, gradients


def _buffers(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randn(5, 7, generator=generator)
    return [
        drawn[0] > 0,
        drawn.clone(),
        torch.tensor(10**12 + rank),
        drawn.t(),
        drawn.double().sum(),
        torch.full((3,), torch.nan if rank == 0 else 1.0, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor([rank, 3], dtype=torch.uint8),
        torch.complex(drawn, drawn),
    ]


def _bits(buffers: list[Tensor]) -> list[list[int]]:
    return [each.reshape(-1).contiguous().view(torch.uint8).tolist() for each in buffers]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_rank_ends_with_those_of_rank_0_bit_for_bit(world: int) -> None:
    def rank(comm: Comm) -> list[list[int]]:
        buffers = _buffers(comm.rank)
        carried = BufferBroadcast(buffers, comm.rank)
        for _ in range(2):  # its room is used again
            carried.pack(BufferTransfer())
            carried.send(comm)
            carried.wait()
            before = [each._version for each in buffers]
            carried.land()
            assert [each._version for each in buffers] == before
            if comm.rank == 0:
                buffers[1] += 1.0
            else:
                buffers[2] += 5
        return _bits(buffers)

    first, *others = run_ranks(world, rank)
    expected = _buffers(0)
    expected[1] += 1.0
    assert first == _bits([expected[0], expected[1] + 1.0, *expected[2:]])
    expected[2] += 5
    assert others == (world - 1) * [_bits(expected)]


def _carried(rank: int, buffers: list[Tensor] | None = None) -> BufferBroadcast:
    carried = BufferBroadcast(_buffers(rank) if buffers is None else buffers, rank)
    carried.pack(BufferTransfer())
    return carried


def test_a_change_after_packing_makes_the_source_stale_and_another_tensor_any_rank() -> None:
    for rank in (0, 1):
        buffers = _buffers(rank)
        carried = _carried(rank, buffers)
        carried.look(buffers, HostDevice())
        assert not carried.is_stale(deferred=False)
        buffers[3].mul_(1.0)  # the same bits as before
        carried.look(buffers, HostDevice())
        assert not carried.is_stale(deferred=False)
        buffers[3].data[2, 3] += 1.0  # no version counter tells
        carried.look(buffers, HostDevice())
        assert carried.is_stale(deferred=False) == (rank == 0)
        carried.pack(BufferTransfer())
        assert not carried.is_stale(deferred=False)
        carried.look([buffers[0].clone(), *buffers[1:]], HostDevice())
        assert carried.is_stale(deferred=False)
        carried.look(buffers[1:], HostDevice())
        assert carried.is_stale(deferred=False)
        buffers[1].resize_(4, 4)
        carried.look(buffers, HostDevice())
        assert carried.is_stale(deferred=False)


def test_a_step_that_cannot_wait_tells_what_the_one_before_has_found() -> None:
    buffers = _buffers(0)
    carried = _carried(0, buffers)
    told = []
    for changes in (True, False, False):
        buffers[3].add_(1.0) if changes else None
        carried.look(buffers, HostDevice())
        told.append(carried.is_stale(deferred=True))
        carried.pack(BufferTransfer())
    assert told == [False, True, False]
    carried.look(buffers[1:], HostDevice())
    assert carried.is_stale(deferred=True), "that others have taken their places, the host knows"


def test_statistics_of_batch_norm_alone_are_seen_to_change() -> None:
    mean, variance = torch.zeros(4), torch.ones(4)
    carried = _carried(0, [mean, variance])
    nn.functional.batch_norm(torch.randn(8, 4), mean, variance, training=True)
    carried.look([mean, variance], HostDevice())
    assert carried.is_stale(deferred=False)


class Module(nn.Module):
    """Two buffers, of which one is not DDP's business."""

    kept: Tensor
    own: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("own", torch.ones(4))


class Wrapped:
    """As much of DDP as is looked at."""

    def __init__(self, module: nn.Module | None = None, **other: Any) -> None:
        self.module = Module() if module is None else module
        self.parameters_to_ignore = {"own"}
        self.broadcast_buffers, self.require_forward_param_sync = True, True
        vars(self).update(other)


def _of(ddp: Any, world: int = 2) -> Buffers:
    return Buffers(ddp, 0, world)


def _step(buffers: Buffers, in_vain: bool = False) -> BufferBroadcast | None:
    """One backward pass; returns what travelled under it."""
    buffers.pack(BufferTransfer(), measuring=False)
    buffers.look(HostDevice())
    buffers.arrived(buffers.packed is not None and not in_vain, in_vain)
    buffers.land()
    return buffers.packed


def test_room_is_made_anew_only_for_other_tensors() -> None:
    ddp = Wrapped()
    buffers, module = _of(ddp), ddp.module
    first = _step(buffers)
    module.own = torch.ones(9)
    module.kept += 1.0
    assert _step(buffers) is first is not None
    found = [first]
    for change in (
        lambda: module.register_buffer("kept", torch.ones(3)),
        lambda: setattr(module.kept, "data", torch.ones(3, dtype=torch.float64)),
        lambda: module.kept.resize_(7),
        lambda: module.register_buffer("more", torch.ones(1)),
    ):
        change()
        found.append(_step(buffers))
    assert len({id(each) for each in found}) == len(found)
    assert None not in found


JOINS = SimpleNamespace(enable=True)


@pytest.mark.parametrize(
    ("ddp", "world"),
    [
        (Wrapped(broadcast_buffers=False), 2),
        (Wrapped(buffer_hook=object()), 2),
        (Wrapped(_join_config=JOINS), 2),
        (Wrapped(), 1),
        (Wrapped(nn.Linear(2, 2)), 2),
    ],
)
def test_nothing_is_carried_that_is_not_wanted_or_not_there(ddp: Any, world: int) -> None:
    buffers = _of(ddp, world)
    assert _step(buffers) is None
    assert not buffers.current


def test_whether_ranks_join_is_looked_at_in_every_backward_pass() -> None:
    # A rank without a batch in `join()` runs no forward pass, but a shadow of its peers' backward pass.
    ddp: Any = Wrapped()
    buffers = _of(ddp)
    assert _step(buffers) is not None
    ddp._join_config = JOINS
    assert _step(buffers) is None
    assert not buffers.current


def test_dense_steps_that_measure_leave_them_to_ddp() -> None:
    ddp = Wrapped()
    buffers = _of(ddp)
    buffers.pack(BufferTransfer(), measuring=True)
    assert buffers.packed is None


def test_after_leaving_they_are_ddps() -> None:
    ddp = Wrapped()
    buffers = _of(ddp)
    buffers.leave_to_ddp()
    assert _step(buffers) is None


def test_carrying_in_vain_ends_after_three_in_a_row() -> None:
    ddp = Wrapped()
    buffers = _of(ddp)
    assert [_step(buffers, vain) is not None for vain in (True, True, False, True, True)] == 5 * [True]
    assert not buffers.current
    assert [_step(buffers, vain) is not None for vain in (True, False, False)] == [True, False, False]


def test_ddp_is_spared_one_broadcast_for_every_landing() -> None:
    ddp: Any = Wrapped()
    buffers = _of(ddp)
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync
    _step(buffers)
    buffers.before_forward(ddp)
    assert not ddp.require_forward_param_sync
    ddp.require_forward_param_sync = True  # as after every forward pass that a synchronised backward follows
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync
    _step(buffers, in_vain=True)
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync


def test_under_join_finished_ranks_count_on_the_broadcast() -> None:
    ddp: Any = Wrapped()
    buffers = _of(ddp)
    _step(buffers)
    assert buffers.current
    ddp._join_config = JOINS
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync
    assert not buffers.current


@pytest.mark.parametrize(
    "other",
    [
        Wrapped(broadcast_buffers=False),
        Wrapped(buffer_hook=object()),
        Wrapped(nn.BatchNorm1d(3)),
        Wrapped(nn.Linear(2, 2)),
    ],
)
def test_ranks_must_agree_on_them(other: Any) -> None:
    mine, same = Wrapped(), Wrapped()
    mine.module.own = torch.ones(77)  # not DDP's business
    assert _of(mine).describe() == _of(same).describe() != _of(other).describe()


@pytest.mark.parametrize("text", ["dense", "topk(ratio=0.1)", "fp16"])
def test_in_a_step_they_go_first_and_change_no_mean(text: str) -> None:
    def rank(comm: Comm) -> tuple[Tensor, Tensor, list[list[int]]]:
        alone = Rig(comm, text, unit_elements=1000).step(gradients(comm.rank, 0))
        buffers = _buffers(comm.rank)
        rig = Rig(comm, text, unit_elements=1000, buffers=lambda: _carried(comm.rank, buffers))
        step = rig.step(gradients(comm.rank, 0))
        assert step.step.trace.rounds[0].verb == "broadcast"
        assert "buffers" in {span.unit for span in step.step.trace.spans if span.what == "wire"}
        assert step.step.sent.metered_bytes == step.step.sent.predicted_bytes == alone.step.sent.metered_bytes
        [carried] = step.step.flight.carried
        carried.land()
        return alone.flat(), step.flat(), _bits(buffers)

    for alone, beside, bits in run_ranks(3, rank):
        assert torch.equal(alone, beside)
        assert bits == _bits(_buffers(0))


def test_what_is_stale_on_any_rank_lands_nowhere() -> None:
    def rank(comm: Comm) -> bool:
        carried, buffers = _carried(comm.rank), _buffers(comm.rank)
        carried.look(buffers[comm.rank :], HostDevice()) if comm.rank == 1 else None
        rig = Rig(comm, "topk(ratio=0.1)", buffers=lambda: carried)
        step = rig.step(gradients(comm.rank, 0)).step
        return step.committed and step.flight.stale and not step.flight.carried

    assert run_ranks(3, rank) == 3 * [True]


def test_a_step_that_is_not_finite_brings_them_nevertheless() -> None:
    def rank(comm: Comm) -> tuple[bool, bool]:
        carried, grads = _carried(comm.rank), gradients(comm.rank, 0)
        rig = Rig(comm, "topk(ratio=0.1)", buffers=lambda: carried)
        grads["last.weight"][0] = torch.nan if comm.rank == 1 else 0.0
        step = rig.step(grads).step
        return step.committed, step.flight.carried == [carried]

    assert run_ranks(3, rank) == 3 * [(False, True)]


def test_a_rank_that_cannot_pack_fails_the_step_for_all() -> None:
    full = OSError("no room")

    def rank(comm: Comm) -> Exception | None:
        carried = _carried(comm.rank)
        carried.failure = full if comm.rank == 0 else None
        rig = Rig(comm, "topk(ratio=0.1)", buffers=lambda: carried)
        return rig.step(gradients(comm.rank, 0)).error

    source, *others = run_ranks(3, rank)
    assert source is full
    assert "pack of buffers" in "".join(full.__notes__)
    assert all(isinstance(each, PeerFailed) for each in others)


def test_packing_keeps_its_error_for_the_step() -> None:
    class Unreadable(torch.Tensor):
        def detach(self) -> Unreadable:
            raise MemoryError("no room for a copy")

    carried = BufferBroadcast([torch.ones(3), torch.ones(2).as_subclass(Unreadable)], 0)
    carried.pack(BufferTransfer())
    assert isinstance(carried.failure, MemoryError)
