"""Stochastic levels: kernels for devices against those of the CPU and the reference, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor

from gradwire.kernels.layouts import Grid
from tests.device.bits import same
from tests.support.inputs import KINDS, generator, heavy_tail, normal
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device

KEY = 0xFEDCBA9876543210  # both halves of its hash have their highest bit set, or not, as other keys'
every_width = looped("bits", [2, 4, 8])
# Rows of a tile that are full, or not, or no power of two; parts and buckets that no tile divides; pieces of
# long buckets, of which one is full; clipped norms of short and long ones.
GRIDS = (
    ((513, 0, 3, 1031), 512, "l2", math.inf),
    ((2048,), 512, "max", math.inf),
    ((70, 2), 5, "l2", math.inf),
    ((4096, 33), 5000, "l2", math.inf),
    ((4129, 40), None, "max", math.inf),
    ((4129, 40), None, "max", 2.3),
)


def sent(x: Tensor, grid: Grid, quantize: Callable[..., object]) -> tuple[Tensor, Tensor, Tensor]:
    """Steps, codes, and what is left; memory beside the codes stays as it was."""
    left, steps = x.clone(), torch.full((grid.buckets,), 9.0)
    codes = torch.full((grid.code_bytes + 1,), 0xA5, dtype=torch.uint8)
    assert quantize(left, grid, KEY, steps, codes[:-1], subtract=True) is None
    assert codes[-1] == 0xA5
    return steps, codes[:-1], left


@pytest.mark.rest
@looped(("draw", "bits"), zip(KINDS, cycle((8, 4, 2)), strict=False), few=2)
def test_steps_codes_and_the_rest_are_those_of_the_cpu(draw: Callable[[int], Tensor], bits: int) -> None:
    for sizes, bucket, norm, clip in GRIDS:
        grid = Grid(sizes, bucket, bits, "l2" if norm == "l2" else "max", clip)
        x = draw(sum(sizes))
        found = sent(x, grid, device.quantize)
        for quantize in (cpu.quantize, plain.quantize):
            assert all(map(same, found, sent(x, grid, quantize))), grid


@every_width
def test_buckets_begin_anywhere_and_nothing_is_taken_unasked(bits: int) -> None:
    grid, x = Grid((3, 4096, 1), 512, bits), heavy_tail(4101)[1:]
    assert all(map(same, sent(x, grid, device.quantize), sent(x, grid, cpu.quantize)))
    steps, codes = torch.empty(grid.buckets), torch.empty(grid.code_bytes, dtype=torch.uint8)
    before = x.clone()
    device.quantize(x, grid, KEY, steps, codes)
    assert torch.equal(x, before)
    assert torch.equal(codes, sent(x, grid, cpu.quantize)[1])


def test_words_depend_on_both_halves_of_a_key() -> None:
    grid, x = Grid((700,), 512, 8), normal(700)
    for key in (0, 1, 2**31, 2**63 - 1):
        results = []
        for module in (device, cpu):
            steps, codes = torch.empty(grid.buckets), torch.empty(grid.code_bytes, dtype=torch.uint8)
            module.quantize(x, grid, key, steps, codes)
            results.append(codes)
        assert torch.equal(*results)


@every_width
@looped("weight", [1.0, -1 / 3], few=1)
def test_adding_is_that_of_the_cpu(bits: int, weight: float) -> None:
    for sizes, bucket, norm, clip in GRIDS:
        grid = Grid(sizes, bucket, bits, "l2" if norm == "l2" else "max", clip)
        steps = heavy_tail(grid.buckets).abs()
        steps[::4] = torch.nan
        codes = torch.randint(0, 256, (grid.code_bytes,), generator=generator(bits)).byte()
        outs = [normal(sum(sizes)) for _ in range(3)]
        for module, out in zip((device, cpu, plain), outs, strict=True):
            module.add_quantized(steps, codes, grid, out, weight)
        assert same(outs[0], outs[1])
        assert same(outs[0], outs[2])


def test_other_types_are_declined_untouched() -> None:
    grid, x = Grid((4,), 4, 8), torch.ones(4, dtype=torch.float64)
    steps, codes = torch.ones(1, dtype=torch.float64), torch.ones(4, dtype=torch.uint8)
    assert device.quantize(x, grid, KEY, steps, codes, subtract=True) is not None
    assert device.add_quantized(steps, codes, grid, x, 1.0) is not None
    assert x.sum() == codes.sum() == 4
