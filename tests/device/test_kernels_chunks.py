"""The largest of each chunk: kernels for devices against those of the CPU and the plain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.inputs import CHOICES, normal
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device


@looped("draw", CHOICES, few=1)
def test_the_largest_of_each_chunk_is_that_of_the_cpu(draw: Callable[[int], Tensor]) -> None:
    # Fewer chunks than a program has, more than one program, and one chunk of more than one tile.
    for n, chunks in (
        (0, 5),
        (1, 5),
        (4099, 64),
        (4099, 97),
        (4099, 515),
        (2048, 128),
        (515, 1),
        (100, 100),
        (7, 60_000),
    ):
        x = draw(n)
        found = device.chunk_topk_indices(x, chunks, 1)
        assert torch.equal(found, cpu.chunk_topk_indices(x, chunks, 1))
        assert torch.equal(found, plain.chunk_topk_indices(x, chunks, 1))


def test_a_tie_beyond_the_first_tile_of_a_chunk_stays_on_the_left() -> None:
    x = torch.zeros(900)
    x[[20, 300, 499, 899]] = torch.tensor([2.0, -2.0, 3.0, torch.nan])
    assert device.chunk_topk_indices(x, 2, 1).tolist() == [20, 899]
    x[301] = torch.inf
    x[21] = -torch.inf
    assert device.chunk_topk_indices(x, 1, 1).tolist() == [21]


def test_more_than_one_of_a_chunk_is_declined() -> None:
    assert not isinstance(device.chunk_topk_indices(normal(9), 3, 2), Tensor)
    assert not isinstance(device.chunk_topk_indices(normal(9).double(), 3, 1), Tensor)
