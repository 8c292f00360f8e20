"""Payloads of chosen elements in one call, against the same in several."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.sparse import SparseLayout
from gradwire.errors import WireError
from gradwire.kernels.chosen import (
    add_chosen,
    average_chosen,
    saturating_cast,
    take_chosen,
    unpack_elias_fano,
)
from gradwire.kernels.cpu.halves import narrow, widen
from gradwire.kernels.joined import join, split
from gradwire.kernels.places import add_at
from tests.support.inputs import KINDS
from tests.support.looped import looped

HALVES = (torch.float16, torch.bfloat16)
SIZES = ((0, 5), (1, 1), (3, 1000), (300, 1000), (700, 1000), (1000, 1000), (4099, 20_000), (2048, 5000))


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)


def bits(x: Tensor) -> Tensor:
    """With one NaN for all."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int16 if x.element_size() == 2 else torch.int32)


@looped("dtype", HALVES)
def test_every_half_widens_to_what_it_stands_for(dtype: torch.dtype) -> None:
    halves = every_value(dtype)
    out = torch.empty(halves.numel())
    widen(halves.view(torch.int16).numpy().view(np.uint16), dtype == torch.bfloat16, out.numpy())
    assert torch.equal(bits(out), bits(halves.float()))


@looped("dtype", HALVES)
def test_rounding_is_that_of_torch_at_every_half_between_two_and_beside_both(dtype: torch.dtype) -> None:
    every = every_value(dtype).float()
    exact = every[~every.isnan()].view(torch.int32)
    ties = (1 << 12) if dtype == torch.float16 else (1 << 15)
    random = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(1)).int()
    near = [exact + by for by in (-1, 0, 1, ties - 1, ties, ties + 1)]
    x = torch.cat([*near, random]).view(torch.float32)
    out = torch.empty(x.numel(), dtype=torch.int16)
    narrow(x.numpy(), dtype == torch.bfloat16, out.numpy().view(np.uint16))
    assert torch.equal(bits(out.view(dtype)), bits(saturating_cast(x, dtype)))


def places(count: int, numel: int) -> Tensor:
    return torch.randperm(numel, generator=torch.Generator().manual_seed(count))[:count].sort().values


@looped("kind", KINDS)
@looped("dtype", [torch.float32, *HALVES])
@looped(("count", "numel"), SIZES)
def test_one_call_gives_the_bytes_of_several(count: int, numel: int, dtype: torch.dtype, kind) -> None:
    layout, indices = SparseLayout(count, numel, dtype), places(count, numel)
    x = kind(numel)
    expected = x.clone()
    values = saturating_cast(expected[indices], dtype)
    payload = layout.write(indices, values)
    add_at(expected, indices, values.float(), -1.0)
    taken = take_chosen(x, indices, layout.shape)
    poisoned = values.isnan().any()
    assert taken.shape == payload.shape
    assert poisoned or torch.equal(taken, payload)
    assert torch.equal(bits(x), bits(expected))
    slow = kind(numel)
    taken = take_chosen.plain(slow, indices, layout.shape)
    assert poisoned or torch.equal(taken, payload)
    assert torch.equal(bits(slow), bits(expected))

    out, mean = torch.ones(numel), torch.ones(numel)
    assert add_chosen(payload, layout.shape, out, 0.3)
    add_at(mean, indices, values.float(), 0.3)
    assert torch.equal(bits(out), bits(mean))
    slow = torch.ones(numel)
    assert add_chosen.plain(payload, layout.shape, slow, 0.3)
    assert torch.equal(bits(slow), bits(mean))


@looped("kind", [torch.int32, torch.int64])
def test_places_of_either_type(kind: torch.dtype) -> None:
    layout, indices = SparseLayout(300, 1000, torch.float16), places(300, 1000)
    payload = take_chosen(torch.ones(1000), indices.to(kind), layout.shape)
    assert torch.equal(layout.read(payload)[0].long(), indices)


@looped(("count", "numel"), [(3, 1000), (300, 1000), (700, 1000)])
@looped("wrong", ["negative", "beyond", "twice", "descending"])
def test_places_that_do_not_ascend_within_x_raise_and_leave_it(wrong: str, count: int, numel: int) -> None:
    indices = places(count, numel)
    match wrong:
        case "negative":
            indices[0] = -1
        case "beyond":
            indices[-1] = numel
        case "twice":
            indices[1] = indices[0]
        case "descending":
            indices = indices.flip(0)
    x = torch.ones(numel)
    with pytest.raises(ValueError, match="must ascend within 0"):
        take_chosen(x, indices, SparseLayout(count, numel, torch.float16).shape)
    assert torch.equal(x, torch.ones(numel))


@looped(("count", "numel"), [(3, 1000), (300, 1000), (700, 1000)])
def test_damaged_words_are_refused_or_stay_within_bounds_and_zeros_add_nothing(
    count: int, numel: int
) -> None:
    layout = SparseLayout(count, numel, torch.float32)
    payload = layout.write(places(count, numel), torch.ones(count))
    generator = torch.Generator().manual_seed(count)
    refused = 0
    for _ in range(200):
        damaged, out = payload.clone(), torch.zeros(numel)
        at = int(torch.randint(4 * layout.shape.words, (1,), generator=generator))
        damaged[at] ^= int(torch.randint(1, 256, (1,), generator=generator))
        slow = torch.zeros(numel)
        sound = add_chosen.plain(damaged, layout.shape, slow)
        try:
            layout.add(damaged, out, 1.0)
            assert int(out.count_nonzero()) == count
            assert sound
        except WireError:
            refused += 1
            assert not sound
            assert not out.any()
        assert torch.equal(out, slow)
    assert refused > 0
    out = torch.zeros(numel)
    layout.add(torch.zeros_like(payload), out, 1.0)
    assert not out.any()


def test_sizes_that_do_not_fit_raise() -> None:
    shape = SparseLayout(3, 1000, torch.float32).shape
    with pytest.raises(ValueError, match="999 elements"):
        take_chosen(torch.ones(999), torch.tensor([1, 2, 3]), shape)
    with pytest.raises(ValueError, match="2 indices"):
        take_chosen(torch.ones(1000), torch.tensor([1, 2]), shape)
    with pytest.raises(ValueError, match="4 bytes"):
        add_chosen(torch.zeros(4, dtype=torch.uint8), shape, torch.ones(1000))


def test_a_mark_that_a_kernel_would_write_outside_of_is_refused() -> None:
    shape = SparseLayout(3, 1000, torch.float32).shape
    rows, out = torch.zeros(1, shape.bytes, dtype=torch.uint8), torch.ones(1000)
    words, flat = torch.zeros(shape.planes.words, dtype=torch.int32), torch.zeros(2)
    for mark in (torch.zeros(1, dtype=torch.bool), torch.zeros(0, dtype=torch.int32)):
        for call in (
            lambda mark: average_chosen(rows, shape, out, 1.0, mark),
            lambda mark: unpack_elias_fano(words, shape.planes, mark),
            lambda mark: join([flat[:1]], flat, 1.0, mark),
            lambda mark: split(flat, [flat[:1]], mark),
        ):
            with pytest.raises(ValueError, match="a mark is one int32"):
                call(mark)


@looped("dtype", [torch.float64, torch.float16])
def test_other_types_take_several_calls(dtype: torch.dtype) -> None:
    layout, x = SparseLayout(300, 1000, torch.float16), torch.randn(1000).to(dtype)
    indices, expected = places(300, 1000), x.clone()
    payload, out = layout.take(x, indices), torch.zeros(1000, dtype=dtype)
    layout.add(payload, out, 1.0)
    assert torch.equal(out[indices], expected[indices].half().to(dtype))
    assert torch.equal(x + out, expected)
