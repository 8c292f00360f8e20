"""Places packed, unpacked and added at: kernels for devices against those of the CPU and the plain."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.indices import elias_fano_planes
from gradwire.codec.sparse import sparse_layout
from tests.device.bits import same
from tests.support.inputs import KINDS, generator, heavy_tail
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device

TYPES = (torch.float32, torch.float16, torch.bfloat16)
# A list, coded places of one program and of several, a bitmap, everything, one, none.
SIZES = ((3, 1000), (40, 1000), (1500, 20_000), (700, 1000), (2100, 2100), (1, 1), (0, 5))


def places(count: int, numel: int, seed: int = 0) -> Tensor:
    """Ascending indices, drawn."""
    return torch.randperm(numel, generator=generator(seed + count))[:count].sort().values


@looped(("size", "dtype"), product(SIZES, TYPES), by=lambda row: str(row[1]).split(".")[1], few=1)
def test_payloads_are_those_of_the_cpu(size: tuple[int, int], dtype: torch.dtype) -> None:
    count, numel = size
    shape, indices = sparse_layout(count, numel, dtype).shape, places(count, numel)
    for number, draw in enumerate(KINDS):
        if number % 4 != count % 4:
            continue
        x = draw(numel)
        found = []
        for module in (device, cpu, plain):
            left = x.clone()
            found.append((module.take_chosen(left, indices, shape), left))
        for payload, left in found[1:]:
            assert same(found[0][1], left)
            one, other = (shape.parts(each) for each in (found[0][0], payload))
            assert torch.equal(one[0], other[0])
            assert same(one[1].float(), other[1].float())


@looped("dtype", TYPES)
def test_what_is_not_finite_travels_as_by_the_cpu(dtype: torch.dtype) -> None:
    x, indices = heavy_tail(1000), places(40, 1000)
    x[indices[::3]], x[indices[1::3]], x[indices[2::3]] = torch.inf, -torch.inf, torch.nan
    shape = sparse_layout(40, 1000, dtype).shape
    one, other = (shape.parts(module.take_chosen(x.clone(), indices, shape))[1] for module in (device, cpu))
    assert same(one.float(), other.float())


@looped(("size", "dtype"), product(SIZES, TYPES), by=lambda row: str(row[1]).split(".")[1], few=1)
def test_adding_is_that_of_the_cpu(size: tuple[int, int], dtype: torch.dtype) -> None:
    count, numel = size
    shape = sparse_layout(count, numel, dtype).shape
    if not count:
        return
    payloads = torch.stack([
        cpu.take_chosen(heavy_tail(numel).roll(rank), places(count, numel, rank), shape) for rank in range(3)
    ])  # fmt: skip
    outs = [heavy_tail(numel) for _ in range(3)]
    for module, out in zip((device, cpu, plain), outs, strict=True):
        assert bool(module.add_chosen(payloads[0], shape, out, -1 / 3))
    assert same(outs[0], outs[1])
    assert same(outs[0], outs[2])
    nothing = torch.zeros_like(payloads[0])
    for rows in (payloads, torch.stack([payloads[0], nothing, payloads[2]])):
        assert bool(device.average_chosen(rows, shape, outs[0], 1 / 3))
        assert bool(plain.average_chosen(rows, shape, outs[1], 1 / 3))
        assert same(outs[0], outs[1])


@looped(("count", "numel"), SIZES)
def test_places_alone_are_those_of_the_cpu(count: int, numel: int) -> None:
    planes, indices = elias_fano_planes(count, numel), places(count, numel)
    for dtype in (torch.int32, torch.int64):
        packed = device.pack_elias_fano(indices.to(dtype), planes)
        assert torch.equal(packed, cpu.pack_elias_fano(indices.to(dtype), planes))
    found, sound = device.unpack_elias_fano(packed, planes)
    assert bool(sound)
    assert torch.equal(found, indices.int())


def damaged(words: Tensor, number: int) -> Tensor:
    """Some bits flipped."""
    at = torch.randint(32 * words.numel(), (1 + number % 3,), generator=generator(number))
    found = words.clone()
    for bit in at.tolist():
        found[bit // 32] ^= -(1 << 31) if bit % 32 == 31 else 1 << (bit % 32)
    return found


@looped(("count", "numel"), [(3, 1000), (40, 1000), (1500, 12_000), (700, 1000)], few=1)
def test_words_that_stand_for_no_choice_are_found_as_on_the_cpu(count: int, numel: int) -> None:
    shape = sparse_layout(count, numel, torch.float32).shape
    good = cpu.take_chosen(heavy_tail(numel), places(count, numel), shape)
    found = set[bool]()
    for number in range(12):
        payload = good.clone()
        words, _values = shape.parts(payload)
        words.copy_(damaged(words, number))
        outs = [heavy_tail(numel) for _ in range(2)]
        sound = [
            bool(each.add_chosen(payload, shape, out)) for each, out in zip((device, cpu), outs, strict=True)
        ]
        assert sound[0] == sound[1], number
        assert same(*outs)
        found.add(sound[0])
        if number < 2:
            rows = torch.stack([good, payload])
            heard = [
                bool(each.average_chosen(rows, shape, out, 0.5))
                for each, out in zip((device, plain), outs, strict=True)
            ]
            assert heard == sound
            assert same(*outs)
            for each, out in zip((device, cpu, plain), (*outs, outs[0].clone()), strict=True):
                mark = torch.zeros(1, dtype=torch.int32)
                assert each.average_chosen(rows, shape, out, 0.5, mark) is True
                each.average_chosen(torch.stack([good, good]), shape, out, 0.5, mark)
                assert mark.item() == (not sound[0]), "and it stays"
    assert False in found


def test_places_out_of_order_are_no_choice_wherever_they_lie() -> None:
    planes = elias_fano_planes(40, 1000)
    ascending = torch.cat([2 * torch.arange(16), torch.arange(500, 524)])
    good = cpu.pack_elias_fano(ascending, planes)
    width = planes.low_bits
    for place in range(15):
        if place >> width != (place + 1) >> width:
            continue  # the upper parts differ, and say the order
        bits = np.unpackbits(good.numpy().view(np.uint8), bitorder="little")
        low = bits[: 40 * width].reshape(40, width)
        low[[place, place + 1]] = low[[place + 1, place]]
        words = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
        for module in (device, cpu):
            assert not bool(module.unpack_elias_fano(words, planes)[1]), place
            mark = torch.zeros(1, dtype=torch.int32)
            assert module.unpack_elias_fano(words, planes, mark)[1] is True
            assert mark.item() == 1


def test_zeros_are_no_choice_and_nothing_is_added() -> None:
    shape = sparse_layout(40, 1000, torch.float32).shape
    out = torch.ones(1000)
    assert not bool(device.add_chosen(torch.zeros(shape.bytes, dtype=torch.uint8), shape, out))
    assert torch.equal(out, torch.ones(1000))


def test_other_types_are_declined() -> None:
    shape = sparse_layout(3, 10, torch.float64).shape
    wide, indices = torch.ones(10, dtype=torch.float64), places(3, 10)
    assert device.take_chosen(wide, indices, shape) is NotImplemented
    payload = torch.zeros(shape.bytes, dtype=torch.uint8)
    assert device.add_chosen(payload, shape, wide) is NotImplemented
    assert device.average_chosen(payload.view(1, -1), shape, wide, 1.0) is NotImplemented


@looped("dtype", [torch.int32, torch.int64])
def test_elements_are_taken_and_put_as_by_the_cpu(dtype: torch.dtype) -> None:
    indices = places(1500, 5000).to(dtype)
    found = []
    for module in (device, cpu, plain):
        x, out, other = heavy_tail(5000), torch.ones(5000), torch.ones(5000)
        values = module.take(x, indices, -1 / 3)
        module.put(out, indices, values)
        module.scatter(other, indices, values)
        found.append((values, x, out, other))
    for others in found[1:]:
        assert all(map(same, found[0], others))


@looped("indices", [(), (0,), (4095, 4096), (0, 4096, 9999), tuple(range(3000, 5000))])
def test_values_are_put_into_zeros_wherever_they_lie(indices: tuple[int, ...]) -> None:
    places_, values = torch.tensor(indices, dtype=torch.int64), torch.arange(1.0, len(indices) + 1)
    out, expected = torch.ones(10_000), torch.ones(10_000)
    device.put(out, places_, values)
    plain.put(expected, places_, values)
    assert torch.equal(out, expected)
