"""The program of a launch that ends last finishes what all have begun, whichever program that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gradwire.codec.indices import elias_fano_planes
from gradwire.codec.sparse import sparse_layout
from tests.device.bits import same
from tests.support.inputs import generator, heavy_tail, special
from tests.support.looped import looped
from tests.support.twins import cpu
from tests.support.where import WHERE

pytest.importorskip("triton", reason="kernels for devices need Triton")

from triton.runtime import interpreter

from gradwire.kernels.device.launch import counter_of
from tests.device.there import device

pytestmark = pytest.mark.skipif(WHERE.type != "cpu", reason="a device has an order of its own")


@contextmanager
def shuffled(seed: int) -> Iterator[list[int]]:
    """Programs run in another order; yields the numbers of those that ran last in launches of several."""
    builder, ran, lasts = interpreter.interpreter_builder, list[int](), list[int]()
    set_place = builder.set_grid_idx

    def placed(x: int, *others: Any) -> None:
        programs = builder.grid_dim[0]
        number = int(torch.randperm(programs, generator=generator(seed + programs))[x])
        set_place(number, *others)
        ran.append(number)
        if x == programs - 1 > 0:
            lasts.append(number)

    with patch.object(builder, "set_grid_idx", placed):
        yield lasts


@looped("seed", range(3), few=1)
def test_the_order_of_programs_changes_nothing(seed: int) -> None:
    with shuffled(seed) as lasts:
        for x in (heavy_tail(15_011), special(15_011)):
            assert torch.equal(device.topk_indices(x, 1000), cpu.topk_indices(x, 1000))
        for count, numel in ((2500, 20_000), (3000, 4000)):
            shape = sparse_layout(count, numel, torch.float16).shape
            indices = torch.randperm(numel, generator=generator(seed))[:count].sort().values
            payloads = [each.take_chosen(heavy_tail(numel), indices, shape) for each in (device, cpu)]
            assert torch.equal(payloads[0][: 4 * shape.words], payloads[1][: 4 * shape.words])
            rows = torch.stack([payloads[1], torch.zeros_like(payloads[1]), payloads[1]])
            outs = torch.ones(2, numel)
            assert bool(device.average_chosen(rows, shape, outs[0], 0.5))
            assert bool(cpu.average_chosen(rows, shape, outs[1], 0.5))
            assert same(*outs)
    assert len(set(lasts)) > 2


@looped("seed", range(4))
def test_invalid_places_are_replaced_after_all_have_been_written(seed: int) -> None:
    planes = elias_fano_planes(2500, 20_000)
    words = cpu.pack_elias_fano(torch.arange(2500) * 8, planes)
    words[planes.starts[1] + 3 + seed] = -1  # a group that there is not
    with shuffled(seed):
        found, sound = device.unpack_elias_fano(words, planes)
    expected, is_sound = cpu.unpack_elias_fano(words, planes)
    assert bool(sound) == is_sound
    assert torch.equal(found, expected)
    assert not is_sound


def test_the_counter_is_ready_for_the_next_launch() -> None:
    device.topk_indices(heavy_tail(9000), 90)
    assert counter_of(torch.device("cpu")).tolist() == [0]
