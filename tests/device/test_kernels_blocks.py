"""Blocks in few bits: kernels for devices against those of the CPU and the plain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from gradwire.kernels.layouts import LARGEST, BlockKind, ScaledBlocks
from tests.device.bits import same
from tests.support.inputs import KINDS, generator, heavy_tail, normal
from tests.support.looped import looped
from tests.support.twins import cpu, plain

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device

Coder = Callable[..., object]
every_kind = looped("kind", LARGEST)
# Parts of sizes that no block divides, and blocks that fill a tile, or not, or are a power of two, or not.
LAYOUTS = (((0, 1, 2305, 0, 511), 256), ((513,), 64), ((2048,), 256), ((17, 3), 3), ((700, 2), 5000))


def encoded(
    x: Tensor, blocks: ScaledBlocks, encode: Coder, left: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, codes, and what is left."""
    rest, scales = x.clone(), torch.empty(blocks.count)
    codes = torch.full((blocks.code_bytes + 1,), 99, dtype=torch.uint8)
    assert encode(rest, blocks, scales, codes[:-1], left) is None
    assert codes[-1] == 99
    return scales, codes[:-1], rest


@looped(("draw", "kind"), product(KINDS, LARGEST), by=lambda row: row[1], few=2)
def test_scales_codes_and_the_rest_are_those_of_the_cpu(
    draw: Callable[[int], Tensor], kind: BlockKind
) -> None:
    for sizes, block in LAYOUTS:
        blocks = ScaledBlocks(sizes, block, kind)
        x = draw(blocks.numel)
        found = encoded(x, blocks, device.encode_blocks)
        for encode in (cpu.encode_blocks, plain.encode_blocks):
            assert all(map(same, found, encoded(x, blocks, encode)))


@every_kind
def test_blocks_begin_anywhere(kind: BlockKind) -> None:
    blocks = ScaledBlocks((3, 4096, 1), 256, kind)
    x = heavy_tail(4101)[1:]
    assert all(map(same, encoded(x, blocks, device.encode_blocks), encoded(x, blocks, cpu.encode_blocks)))
    scales, _codes, rest = encoded(x, blocks, device.encode_blocks, left=False)
    assert torch.equal(rest, x)
    assert same(scales, encoded(x, blocks, cpu.encode_blocks)[0])


@every_kind
def test_decoding_is_that_of_the_cpu(kind: BlockKind) -> None:
    for sizes, block in LAYOUTS:
        blocks = ScaledBlocks(sizes, block, kind)
        scales = normal(blocks.count).abs() * 1e-3
        scales[::5] = torch.nan
        # All bytes, though int8 never says -128, nor int4 -8, nor fp8 NaN.
        codes = torch.randint(0, 127, (blocks.code_bytes,), generator=generator(1), dtype=torch.uint8)
        for weight in (1.0, -1 / 3):
            outs = [normal(blocks.numel) for _ in range(3)]
            for module, out in zip((device, cpu, plain), outs, strict=True):
                module.add_blocks(scales, codes, blocks, out, weight)
            assert same(outs[0], outs[1])
            assert same(outs[0], outs[2])


def test_what_no_program_can_hold_is_declined() -> None:
    x, codes = torch.zeros(4), torch.zeros(4, dtype=torch.uint8)
    assert device.encode_blocks(x, ScaledBlocks((4,), 8193, "int8"), torch.zeros(1), codes, True) is not None
    wide = x.double()
    assert device.encode_blocks(wide, ScaledBlocks((4,), 8, "int8"), wide[:1], codes, True) is not None
