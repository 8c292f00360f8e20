"""Buffers on their way: what is packed, what lands, and when DDP is spared its own broadcast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.comm import Comm, run_ranks
from gradwire.ddp.buffers import Buffers, Carried
from gradwire.errors import PeerFailed
from tests.unit.ddp.rig import Rig, gradients


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
        carried = Carried(buffers, comm.rank)
        for _ in range(2):  # its room is used again
            carried.pack()
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


def test_only_the_source_can_be_stale() -> None:
    for rank in (0, 1):
        buffers = _buffers(rank)
        carried = Carried(buffers, rank)
        carried.pack()
        assert not carried.is_stale
        buffers[3].mul_(2.0)
        assert carried.is_stale == (rank == 0)
        carried.pack()
        assert not carried.is_stale


class Module(nn.Module):
    """Two buffers, of which one is not DDP's business."""

    kept: Tensor
    own: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("own", torch.ones(4))
        self._ddp_params_and_buffers_to_ignore = ["own"]


def _ddp(**other: Any) -> Any:
    return SimpleNamespace(broadcast_buffers=True, require_forward_param_sync=True, **other)


TWO: Any = SimpleNamespace(rank=0, world=2)


def test_room_is_made_anew_only_for_other_tensors() -> None:
    module = Module()
    buffers = Buffers(module)
    buffers.before_forward(_ddp())
    first = buffers.carried(TWO)
    module.own = torch.ones(9)
    module.kept += 1.0
    assert buffers.carried(TWO) is first is not None
    found = [first]
    for change in (
        lambda: module.register_buffer("kept", torch.ones(3)),
        lambda: setattr(module.kept, "data", torch.ones(3, dtype=torch.float64)),
        lambda: module.kept.resize_(7),
        lambda: module.register_buffer("more", torch.ones(1)),
    ):
        change()
        found.append(buffers.carried(TWO))
    assert len({id(each) for each in found}) == len(found)
    assert None not in found


JOINS = SimpleNamespace(enable=True)


@pytest.mark.parametrize(
    ("ddp", "world"),
    [
        (SimpleNamespace(broadcast_buffers=False), 2),
        (_ddp(buffer_hook=object()), 2),
        (_ddp(_join_config=JOINS), 2),
        (_ddp(), 1),
    ],
)
def test_nothing_is_carried_that_is_not_wanted(ddp: Any, world: int) -> None:
    buffers = Buffers(Module())
    assert buffers.carried(TWO) is None, "before the first forward pass"
    buffers.before_forward(_ddp())
    assert buffers.carried(TWO) is not None
    buffers.before_forward(ddp)
    assert buffers.carried(SimpleNamespace(rank=0, world=world)) is None  # type: ignore[arg-type]


def test_a_model_without_buffers_carries_none() -> None:
    buffers = Buffers(nn.Linear(2, 2))
    buffers.before_forward(_ddp())
    assert buffers.carried(TWO) is None


def test_ddp_is_spared_one_broadcast_for_every_landing() -> None:
    buffers = Buffers(Module())
    ddp = _ddp()
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync
    buffers.arrived(buffers.carried(TWO))
    buffers.land()
    buffers.before_forward(ddp)
    assert not ddp.require_forward_param_sync
    ddp.require_forward_param_sync = True  # as after every forward pass that a synchronised backward follows
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync
    buffers.arrived(None)
    buffers.land()
    assert not buffers.current


def test_under_join_finished_ranks_count_on_the_broadcast() -> None:
    buffers = Buffers(Module())
    buffers.current = True
    ddp = _ddp(_join_config=JOINS)
    buffers.before_forward(ddp)
    assert ddp.require_forward_param_sync
    assert not buffers.current


@pytest.mark.parametrize("text", ["dense", "topk(ratio=0.1)", "fp16"])
def test_in_a_step_they_go_first_and_change_no_mean(text: str) -> None:
    def rank(comm: Comm) -> tuple[Tensor, Tensor, list[list[int]]]:
        alone = Rig(comm, text, unit_elements=1000).step(gradients(comm.rank, 0))
        rig, buffers = Rig(comm, text, unit_elements=1000), _buffers(comm.rank)
        rig.engine.buffers = lambda: Carried(buffers, comm.rank)
        step = rig.step(gradients(comm.rank, 0))
        assert step.step.trace.rounds[0].verb == "broadcast"
        assert "buffers" in {span.unit for span in step.step.trace.spans if span.what == "wire"}
        assert step.step.metered_bytes == step.step.predicted_bytes == alone.step.metered_bytes
        assert step.step.buffers is not None
        step.step.buffers.land()
        return alone.flat(), step.flat(), _bits(buffers)

    for alone, beside, bits in run_ranks(3, rank):
        assert torch.equal(alone, beside)
        assert bits == _bits(_buffers(0))


def test_dense_steps_that_measure_leave_them_to_ddp() -> None:
    def rank(comm: Comm) -> bool:
        rig = Rig(comm, "auto")
        rig.engine.buffers = lambda: Carried(_buffers(comm.rank), comm.rank)
        return rig.step(gradients(comm.rank, 0)).step.buffers is None

    assert run_ranks(2, rank) == [True, True]


def test_after_retiring_they_are_ddps_again() -> None:
    def rank(comm: Comm) -> list[bool]:
        rig = Rig(comm, "fp16")
        rig.engine.buffers = lambda: Carried(_buffers(comm.rank), comm.rank)
        carried = [rig.step(gradients(comm.rank, 0)).step.buffers is not None]
        rig.engine.retire()
        return [*carried, rig.step(gradients(comm.rank, 1)).step.buffers is not None]

    assert run_ranks(2, rank) == 2 * [[True, False]]


def test_what_changes_after_it_was_sent_lands_nowhere() -> None:
    def rank(comm: Comm) -> bool:
        rig, buffers = Rig(comm, "topk(ratio=0.1)"), _buffers(comm.rank)
        rig.engine.buffers = lambda: Carried(buffers, comm.rank)
        if comm.rank == 0:
            rig.engine.inspect = lambda *_: buffers.append(buffers[1].add_(1.0))
        step = rig.step(gradients(comm.rank, 0)).step
        return step.committed and step.buffers is None

    assert run_ranks(3, rank) == 3 * [True]


def test_a_rank_that_cannot_pack_fails_the_step_for_all() -> None:
    def rank(comm: Comm) -> Exception | None:
        rig, buffers = Rig(comm, "topk(ratio=0.1)"), _buffers(comm.rank)
        carried = Carried(buffers, comm.rank)
        if comm.rank == 0:
            buffers[3].set_()  # without elements, where there were 35
        rig.engine.buffers = lambda: carried
        return rig.step(gradients(comm.rank, 0)).error

    source, *others = run_ranks(3, rank)
    assert source is not None
    assert "pack of buffers" in "".join(source.__notes__)
    assert all(isinstance(each, PeerFailed) for each in others)
