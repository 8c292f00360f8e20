"""One bit per element: kernels for devices against those of the CPU and the plain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from gradwire.kernels.layouts import Blocks
from tests.device.bits import same
from tests.support.inputs import FINITE, generator, heavy_tail, mostly_nan, normal, special
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device

# Parts that no tile divides, whole or in blocks that are shorter than a tile, or longer.
LAYOUTS = (
    Blocks((4099, 0, 13)),
    Blocks((2048,)),
    Blocks((4100, 7), 1024),
    Blocks((5000,), 2056),
    Blocks((0,)),
)
every_level = looped("levels", [1, 2])


def packed(
    x: Tensor, blocks: Blocks, levels: int, pack: Callable[..., object]
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, bits, and what is left."""
    rest, means = x.clone(), torch.empty(blocks.count, levels)
    bits = torch.full((blocks.bytes + 1,), 99, dtype=torch.uint8)
    assert pack(rest, blocks, means, bits[:-1], leave=True) is None
    assert bits[-1] == 99
    return means, bits[:-1], rest


def one_unit(x: Tensor) -> Tensor:
    """The distance to the next number of float32."""
    return torch.nextafter(x.abs(), torch.full_like(x, torch.inf)) - x.abs()


@looped(("draw", "levels"), product([*FINITE, special, mostly_nan], [1, 2]), few=2)
def test_bits_levels_and_the_rest_are_those_of_the_cpu(draw: Callable[[int], Tensor], levels: int) -> None:
    for blocks in LAYOUTS:
        x = draw(blocks.numel)
        means, bits, rest = packed(x, blocks, levels, device.pack_signs)
        for pack in (cpu.pack_signs, plain.pack_signs):
            expected = packed(x, blocks, levels, pack)
            assert torch.equal(bits, expected[1])
            # Sums of float64 in another order differ by less than 2^-40 here, and then are rounded to 2^-24.
            off = (means - expected[0]).abs() <= one_unit(expected[0])
            assert (off | ~expected[0].isfinite()).all()
            assert torch.equal(means.isnan(), expected[0].isnan())
        # What is left is what the CPU leaves, given the same levels.
        other = x.clone()
        cpu.add_signs(means, bits, blocks, other, -1.0)
        assert same(rest, other)


@every_level
@looped("weight", [1.0, -0.3])
def test_adding_is_that_of_the_cpu(levels: int, weight: float) -> None:
    for blocks in LAYOUTS:
        means = heavy_tail(blocks.count * levels).view(-1, levels)
        means[::3] = torch.nan
        bits = torch.randint(0, 256, (blocks.bytes,), generator=generator(3)).byte()
        outs = [normal(blocks.numel) for _ in range(3)]
        for module, out in zip((device, cpu, plain), outs, strict=True):
            module.add_signs(means, bits, blocks, out, weight)
        assert same(outs[0], outs[1])
        assert same(outs[0], outs[2])


def test_without_leave_nothing_is_taken() -> None:
    x, blocks = normal(4099), Blocks((4099,))
    means, bits = torch.empty(1, 1), torch.empty(blocks.bytes, dtype=torch.uint8)
    before = x.clone()
    device.pack_signs(x, blocks, means, bits)
    assert torch.equal(x, before)
