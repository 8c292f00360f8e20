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


@looped("draw", CHOICES, few=2)
def test_the_largest_are_those_of_the_cpu(draw: Callable[[int], Tensor]) -> None:
    assert agrees(draw(20_011), 200)


@looped(("n", "k"), [(0, 0), (1, 0), (1, 1), (31, 7), (8192, 1), (8193, 8193), (9001, 4500)])
def test_any_number_of_any_size(n: int, k: int) -> None:
    assert agrees(heavy_tail(n), k)


@looped("guess", [0, 1, 0x7F800000])
def test_whatever_the_guess_the_choice_is_exact(guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything passes and has room, or has none, or too few pass: the latter two read x again.
    def begin(_x: Tensor, _k: int, state: Tensor) -> bool:
        state.zero_()
        state[1] = guess
        return True

    monkeypatch.setattr(topk, "_begin", begin)
    for spare in (0, 1 << 16):
        monkeypatch.setattr(topk, "_SPARE", spare)
        assert agrees(torch.randint(-3, 4, (9001,), generator=generator(1)).float(), 50)


def test_what_is_gathered_in_one_place_has_room() -> None:
    x = normal(40_000) * 1e-3
    x[17_000:17_400] += 5.0
    assert agrees(x, 400)


def test_other_types_are_declined() -> None:
    assert device.topk_indices(torch.ones(4, dtype=torch.float64), 1) is NotImplemented
