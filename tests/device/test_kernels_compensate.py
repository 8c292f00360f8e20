"""Compensation and what depends on flags: kernels for devices against those of the CPU, and both by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels.pieces import Pieces
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM
from tests.device.bits import same
from tests.support.inputs import KINDS, heavy_tail, normal, special
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from gradwire.kernels.device.launch import TILE
from tests.device.there import device

SIZES = (0, 1, 7, 2048, 4099)


@looped("draw", KINDS, few=2)
def test_compensation_is_that_of_the_cpu(draw: Callable[[int], Tensor]) -> None:
    for n in SIZES:
        grad, committed = draw(n), normal(n)
        for memory in (None, committed):
            found, expected = torch.empty(n), torch.empty(n)
            seen = device.compensate(found, memory, grad, 0.9, 0.3)
            assert seen.read() == cpu.compensate(expected, memory, grad, 0.9, 0.3).read()
            assert same(found, expected)


@looped("nesterov", [False, True])
def test_momentum_is_that_of_the_cpu(nesterov: bool) -> None:
    pieces = Pieces([(0, 4, 2048), (2048, 2052, 1), (2060, 0, 3), (2070, 5, 0)])
    grad = heavy_tail(2053)
    committed = normal(4140).view(2, 2070)
    for scale in (0.5, [0.5, 2.0, 0.1, 1.0]):
        found, expected = torch.zeros(2, 2, 2070)
        seen = device.compensate_momentum(
            tuple(found), tuple(committed), grad, 0.9, scale, pieces, nesterov=nesterov
        )
        other = cpu.compensate_momentum(
            tuple(expected), tuple(committed), grad, 0.9, scale, pieces, nesterov=nesterov
        )
        assert seen.read() == other.read()
        assert same(found, expected)


@looped("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_and_memories_are_widened_exactly(dtype: torch.dtype) -> None:
    grad, committed, found = special(2051).to(dtype), normal(2051).bfloat16(), torch.empty(2051)
    seen = device.compensate(found, committed, grad, 0.9, 0.3)
    assert isinstance(seen.finite, Tensor)
    # Two products and a sum, each rounded: torch's own `alpha` may round once.
    coefficient, scale = torch.tensor(0.9), torch.tensor(0.3)
    assert same(found, committed.float() * coefficient + grad.float() * scale)
    assert seen.read() == ((), False)


@looped("shift", [0, 1])
def test_pieces_stay_apart_and_each_has_its_flag(shift: int) -> None:
    rows = [(4, 0, 4096), (5000, 4096, 3), (5004, 4100, 2049), (8000, 7000, 0), (8000, 7000, 1)]
    pieces = Pieces([(plane + shift, bucket, numel) for plane, bucket, numel in rows])
    grad = torch.zeros(7001)
    grad[2500], grad[4100] = 1.0, torch.nan
    committed = normal(8003)
    found, expected = torch.full((2, 8003), 7.0)
    seen = device.compensate(found, committed, grad, 1.0, 1.0, pieces)
    assert (
        seen.read()
        == cpu.compensate(expected, committed, grad, 1.0, 1.0, pieces).read()
        == ((1, 3, 4), False)
    )
    assert same(found, expected)
    assert found[4 + shift - 1] == 7.0


@looped(
    ("grad", "memory", "fits"),
    [
        (LARGEST_GRADIENT, 0.0, False),
        (LARGEST_GRADIENT / 2, 0.0, True),
        (0.0, LARGEST_SUM, False),
        (0.0, -LARGEST_SUM / 2, True),
        (3e38, None, True),
        (torch.inf, None, False),
        (0.0, torch.nan, False),
    ],
)
def test_what_is_too_large_to_be_remembered(grad: float, memory: float | None, fits: bool) -> None:
    committed = None if memory is None else torch.tensor([0.0, memory])
    seen = device.compensate(torch.empty(2), committed, torch.tensor([1.0, grad]), 1.0)
    assert seen.read() == ((), fits)


def test_planes_of_other_types_are_declined() -> None:
    for working, grad in ((torch.zeros(2).double(), torch.zeros(2)), (torch.zeros(4)[::2], torch.zeros(2))):
        assert device.compensate(working, None, grad, 1.0) is NotImplemented


@looped("bad", [0.0, 3.0, torch.nan])
def test_poison_reaches_every_buffer_of_every_type(bad: float) -> None:
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    flat = [torch.ones(7).to(dtype) for dtype in types] + [torch.ones(2049), torch.ones(0)]
    guarded = [torch.cat([each, each.new_ones(1)]) for each in flat]
    found = [each[:-1] for each in guarded]
    device.poison(found, torch.tensor(bad))
    plain.poison(flat, torch.tensor(bad))
    for mine, theirs, around in zip(found, flat, guarded, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert around[-1] == 1.0


def test_poison_reaches_the_end_of_buffers_with_more_tiles_than_programs() -> None:
    found = torch.ones(1025 * TILE, dtype=torch.float16)
    device.poison([found[:-1]], torch.tensor(1.0))
    assert found[:-1].isnan().all()
    assert found[-1] == 1.0


@looped("dtype", [torch.float32, torch.float16, torch.bfloat16])
@looped("numel", [0, 1, TILE + 1])
def test_one_value_that_is_not_finite_is_marked_wherever_it_is(numel: int, dtype: torch.dtype) -> None:
    values, mark = (
        torch.full((numel,), torch.finfo(dtype).max, dtype=dtype),
        torch.zeros(1, dtype=torch.int32),
    )
    device.mark_not_finite(values, mark)
    assert mark.item() == 0
    for place, bad in ((0, torch.nan), (numel // 2, torch.inf), (numel - 1, -torch.inf)):
        if numel:
            spoiled, mark = values.clone(), torch.zeros(1, dtype=torch.int32)
            spoiled[place] = bad
            device.mark_not_finite(spoiled, mark)
            assert mark.item() == 1
            device.mark_not_finite(values, mark)
            assert mark.item() == 1


def test_the_last_of_more_tiles_than_programs_is_marked_too() -> None:
    values, mark = torch.zeros(1025 * TILE, dtype=torch.float16), torch.zeros(1, dtype=torch.int32)
    values[-1] = torch.nan
    device.mark_not_finite(values, mark)
    assert mark.item() == 1


def test_idle_pieces_become_zero_and_no_others() -> None:
    pieces = Pieces([(1, 0, 2049), (2060, 0, 3), (2070, 0, 0), (2071, 0, 2)])
    found = torch.ones(2080)
    idle = torch.tensor([True, False, True, True])
    expected = found.clone()
    device.zero_idle(found, pieces, idle)
    plain.zero_idle(expected, pieces, idle)
    assert torch.equal(found, expected)
    assert found.sum() == 2080 - 2049 - 2


@looped("dtype", [torch.float32, torch.float16, torch.bfloat16])
@looped("shift", [0, 1])
def test_marked_compensation_is_that_of_the_cpu(shift: int, dtype: torch.dtype) -> None:
    rows = [(4, 0, 4096), (5000, 4096, 3), (5004, 4100, 2049), (7500, 6149, 4200), (12_000, 10_349, 1)]
    pieces, slots = Pieces([(plane + shift, *rest) for plane, *rest in rows]), (4, 0, 2, 1, 3)
    grad = normal(10_350).to(dtype)
    grad[:2048], grad[4096:4099], grad[6149:10_349] = 0.0, -0.0, 0.0
    for memory in (None, normal(12_002), normal(12_002).bfloat16()):
        found = []
        for compensate in (device.compensate_marked, plain.compensate_marked):
            x, marks = torch.full((12_002,), 7.0), torch.zeros(11, dtype=torch.int32)
            compensate(x, memory, grad, 0.9, 0.5, pieces, slots, marks)
            found.append((x, marks[5:]))
        assert all(map(same, *found))
        assert found[0][1].tolist() == [1, 1, 0, 0, 0, 0]
        assert found[0][0][4 + shift - 1] == 7.0


@looped("bad", [torch.nan, torch.inf, LARGEST_GRADIENT])
def test_what_cannot_be_remembered_is_marked(bad: float) -> None:
    grad, pieces = normal(5000), Pieces([(0, 0, 5000)])
    grad[3000] = bad
    for compensate in (device.compensate_marked, plain.compensate_marked):
        marks = torch.zeros(3, dtype=torch.int32)
        compensate(torch.empty(5000), torch.zeros(5000), grad, 1.0, 1.0, pieces, (0,), marks)
        assert marks[1:].tolist() == [0, 1]
