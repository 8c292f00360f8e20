"""Exact top-k: kernels for devices against those of the CPU and the reference, by each of its ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.device.bits import same
from tests.support.inputs import CHOICES, generator, heavy_tail, normal
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from gradwire.kernels.device import topk
from tests.device.there import device


def agrees(x: Tensor, k: int) -> bool:
    """Whether indices are those of the CPU and the reference, and x is only read."""
    read, found = x.clone(), device.topk_indices(x, k)
    return same(x, read) and all(torch.equal(found, each.topk_indices(x, k)) for each in (cpu, plain))


@looped("draw", CHOICES, few=1)
def test_the_largest_are_those_of_the_cpu(draw: Callable[[int], Tensor]) -> None:
    assert agrees(draw(20_011), 200)


@looped(("n", "k"), [(0, 0), (1, 0), (1, 1), (31, 7), (8192, 1), (8193, 8193), (9001, 4500)])
def test_any_number_of_any_size(n: int, k: int) -> None:
    assert agrees(heavy_tail(n), k)


def key(value: float) -> int:
    """Bits of a magnitude, by which elements are ordered."""
    return int(torch.tensor(value).view(torch.int32))


ONE, TWO, THREE, INFINITY = map(key, (1.0, 2.0, 3.0, torch.inf))


@looped(
    ("lower", "upper"),
    [
        (-1, INFINITY),
        (-1, ONE),
        (0, 0),
        (ONE, ONE),
        (THREE, THREE),
        (0, ONE),
        (ONE, TWO),
        (ONE + 1, THREE - 1),
        (TWO, INFINITY),
        (INFINITY, INFINITY),
    ],
    few=2,
)
def test_whatever_the_bounds_the_choice_is_exact(
    lower: int, upper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one kept lies below, at, between or above the bounds; candidates have room, or have none.
    for room in (5001, 10):

        def begin(_x: Tensor, _k: int, state: Tensor, room: int = room) -> int:
            state.zero_()
            state[2], state[3], state[4] = lower, upper, max((upper - lower - 1).bit_length() - 11, 0)
            return room

        monkeypatch.setattr(topk, "_begin", begin)
        whole = torch.randint(-3, 4, (5001,), generator=generator(1)).float()
        assert agrees(whole, 3500)
        assert agrees(whole + 0.1 * normal(5001), 50)
        # Above the upper bound, and in the last bin below it.
        assert agrees(torch.where(whole > 0, 1.0, 1.0 + 2.0**-23), 3500)


def test_bounds_are_around_the_last_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise one program would look for it among all elements.
    begun, found = topk._begin, list[tuple[int, Tensor]]()

    def begin(x: Tensor, k: int, state: Tensor) -> None:
        begun(x, k, state)
        found.append((topk._sample_of(x.numel(), k).room, state))

    monkeypatch.setattr(topk, "_begin", begin)
    for n, k in ((20_000, 200), (100_000, 3), (30_000, 10_000), (30_000, 29_000), (500, 5)):
        assert agrees(heavy_tail(n), k)
    for room, state in found:
        candidates, same, lower, upper, shift, threshold = state[:6].tolist()
        assert lower <= threshold <= upper
        assert candidates <= room
        assert same < 100
        assert (upper - lower - 1) >> shift < 1 << 11


def test_zeros_may_be_among_the_largest() -> None:
    x = normal(30_000) * (torch.arange(30_000) % 200 == 0)
    for k in (300, 140):
        assert agrees(x, k)


def test_magnitudes_that_are_nearly_the_same_are_told_apart() -> None:
    x = torch.where(normal(20_000) > 0, 1.0, 1.0 + 2.0**-23)
    for k in (18_000, 20_000):
        assert agrees(x, k)


def test_nearly_all_that_is_not_zero_may_be_among_the_largest() -> None:
    x = (1.1 + 0.001 * normal(100_000)) * (torch.arange(100_000) % 16 == 0)
    assert agrees(x, 6000)


def test_what_is_gathered_in_one_place_has_room() -> None:
    x = normal(40_000) * 1e-3
    x[17_000:17_400] += 5.0
    assert agrees(x, 400)


def test_other_types_are_declined() -> None:
    assert device.topk_indices(torch.ones(4, dtype=torch.float64), 1) is NotImplemented
