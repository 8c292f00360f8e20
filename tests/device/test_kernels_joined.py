"""Several tensors as one flat tensor and back: kernels for devices against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.device.bits import same
from tests.support.inputs import special
from tests.support.looped import looped
from tests.support.twins import plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from gradwire.kernels.device.launch import TILE
from tests.device.there import device

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def regions(sizes: tuple[int, ...]) -> list[Tensor]:
    """Of all types in turn, which begin anywhere, with an element around each that nobody may touch."""
    return [special(size + 2).to(TYPES[n % 3])[1:-1] for n, size in enumerate(sizes)]


@looped("sizes", [(), (0,), (1, 2, 3), (7, TILE + 1, 0, 300, 5)])
def test_regions_of_any_types_are_joined_as_torch_does(sizes: tuple[int, ...]) -> None:
    given, numel = regions(sizes), sum(sizes)
    for mark in (None, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)):
        found, expected = torch.full((2, numel + (mark is not None) + 1), 7.0)
        for each, join in ((found, device.join), (expected, plain.join)):
            join(given, each[:-1], 0.3, mark)
        assert same(found, expected)
        assert found[-1] == 7.0


@looped("sizes", [(), (0,), (1, 2, 3), (7, TILE + 1, 0, 300, 5)])
def test_regions_of_any_types_are_written_as_torch_does(sizes: tuple[int, ...]) -> None:
    flat = special(sum(sizes)) if sum(sizes) else torch.empty(0)
    found, expected = regions(sizes), regions(sizes)
    device.split(flat, found)
    plain.split(flat, expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine.float(), theirs.float())
        for each in (mine, theirs):
            around = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())  # type: ignore[call-overload]
            assert same(around[[0, -1]].float(), special(each.numel() + 2).to(each.dtype)[[0, -1]].float())


@looped("bad", [torch.nan, -torch.inf])
def test_one_value_that_is_not_finite_is_marked_wherever_it_is(bad: float) -> None:
    given = [torch.zeros(size, dtype=dtype) for size, dtype in zip((3, TILE + 1, 5), TYPES, strict=True)]
    numel = sum(each.numel() for each in given)
    for place in (None, 0, 3 + TILE, numel - 1, numel):  # the last one is beside all regions
        flat, mark = torch.full((numel + 1,), 1e5), torch.zeros(1, dtype=torch.int32)
        if place is not None:
            flat[place] = bad
        for _again in range(2):
            device.split(flat, given, mark)
            assert mark.item() == (place is not None)
            flat.zero_()  # and a mark stays


def test_what_is_no_float_of_up_to_32_bits_is_declined() -> None:
    for each in (torch.zeros(2, dtype=torch.float64), torch.zeros(4)[::2]):
        assert device.join([each], torch.zeros(2), 1.0) is NotImplemented
        assert device.split(torch.zeros(2), [each]) is NotImplemented
