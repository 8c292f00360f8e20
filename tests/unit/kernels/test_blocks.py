"""Blocks in few bits against the reference, and both by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels.blocks import add_blocks, encode_blocks
from gradwire.kernels.layouts import LARGEST, BlockKind, ScaledBlocks, scale_type
from tests.support.inputs import FINITE, KINDS, constant, half_zeros, normal
from tests.support.looped import looped

Inputs = Callable[[int], Tensor]
SIZES = ([1], [2], [7], [256], [0, 255, 257, 0, 513], [4097], [1000, 3, 3], [40_009])
every_kind = looped("kind", LARGEST)
every_input = looped("draw", KINDS)


def encoded(
    x: Tensor, sizes: list[int], block: int, kind: BlockKind, encode: Callable[..., None] = encode_blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, codes, and what is left."""
    left = x.clone()
    blocks = ScaledBlocks(tuple(sizes), block, kind)
    scales = torch.empty(blocks.count, dtype=scale_type(x.dtype))
    codes = torch.empty(blocks.code_bytes, dtype=torch.uint8)
    encode(left, blocks, scales, codes, left=True)
    return scales, codes, left


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bits, but that any NaN is any other."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.masked_fill(found.isnan(), 0.0).view(torch.int32),
        expected.masked_fill(expected.isnan(), 0.0).view(torch.int32),
    )


@every_input
@every_kind
@looped("sizes", SIZES)
def test_scales_codes_and_the_rest_are_those_of_the_reference(
    kind: BlockKind, draw: Inputs, sizes: list[int]
) -> None:
    x = draw(sum(sizes))
    for block in (1, 3, 64, 256, 50_000):
        scales, codes, left = encoded(x, sizes, block, kind)
        expected = encoded(x, sizes, block, kind, encode_blocks.plain)
        assert same(scales, expected[0])
        assert torch.equal(codes, expected[1])
        assert same(left, expected[2])


@every_input
@every_kind
@looped("sizes", SIZES)
def test_decoded_sums_are_those_of_the_reference(kind: BlockKind, draw: Inputs, sizes: list[int]) -> None:
    x = draw(sum(sizes))
    for block in (1, 3, 64, 256, 50_000):
        scales, codes, _left = encoded(x, sizes, block, kind)
        for weight in (1.0, -1.0, 1 / 3):
            out, expected = normal(x.numel()), normal(x.numel())
            blocks = ScaledBlocks(tuple(sizes), block, kind)
            add_blocks(scales, codes, blocks, out, weight)
            add_blocks.plain(scales, codes, blocks, expected, weight)
            assert same(out, expected)


@every_kind
def test_any_code_decodes_as_in_the_reference(kind: BlockKind) -> None:
    codes = torch.arange(256).repeat(2).to(torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F] if kind == "fp8" else codes  # NaN, which no finite block has
    numel = codes.numel() * (2 if kind == "int4" else 1)
    scales = torch.tensor([0.1, 3.0])
    out, expected = torch.zeros(numel), torch.zeros(numel)
    blocks = ScaledBlocks((numel,), numel // 2, kind)
    add_blocks(scales, codes, blocks, out, 1.0)
    add_blocks.plain(scales, codes, blocks, expected, 1.0)
    assert same(out, expected)


@looped("draw", FINITE)
@every_kind
def test_nothing_decodes_to_more_than_its_blocks_maximum(kind: BlockKind, draw: Inputs) -> None:
    x = draw(2048)
    scales, codes, _left = encoded(x, [2048], 64, kind)
    out = torch.zeros(2048)
    add_blocks(scales, codes, ScaledBlocks((2048,), 64, kind), out, 1.0)
    maxima = x.abs().view(-1, 64).amax(1, keepdim=True)
    # Below the normal range scales are rounded up, by a step of 2^-149 for each of `largest`.
    allowed = maxima.double() + (maxima < 2.0**-100) * LARGEST[kind] * 2.0**-149
    assert (out.view(-1, 64).abs().double() <= allowed).all()


def test_by_hand() -> None:
    x = torch.tensor([254.0, -3.0, 1.0, -0.9, 0.0, -14.0, 5.0])
    scales, codes, left = encoded(x, [4, 3], 256, "int8")
    assert scales.tolist() == [2.0, pytest.approx(14 / 127)]
    # 1.5 and 0.5 are ties: to even.
    assert codes.view(torch.int8).tolist() == [127, -2, 0, 0, 0, -127, 45]
    assert left[:4].tolist() == pytest.approx([0.0, 1.0, 1.0, -0.9])
    scales, codes, left = encoded(x[4:], [3], 256, "int4")
    assert (scales.tolist(), codes.tolist()) == ([2.0], [0x90, 0x02])
    assert left.tolist() == [0.0, 0.0, 1.0]
    scales, codes, left = encoded(torch.tensor([448.0, -1.0, 2.0**-9, 2.0**-10, 17.0]), [5], 256, "fp8")
    assert (scales.tolist(), codes.tolist()) == ([1.0], [0x7E, 0xB8, 0x01, 0x00, 0x58])
    assert left.tolist() == [0.0, 0.0, 0.0, 2.0**-10, 1.0]


@every_kind
def test_zeros_are_zeros_and_what_is_not_finite_poisons_its_block_alone(kind: BlockKind) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.cat([torch.zeros(64), torch.ones(64), torch.ones(64)])
        x[70] = bad
        scales, codes, left = encoded(x, [192], 64, kind)
        out = torch.zeros(192)
        add_blocks(scales, codes, ScaledBlocks((192,), 64, kind), out, 1.0)
        assert not out[:64].any()
        assert not out[64:128].isfinite().any()
        assert not left[64:128].isfinite().any()
        assert out[128:].isfinite().all()


@every_kind
def test_a_parameter_does_not_depend_on_its_neighbours(kind: BlockKind) -> None:
    x = torch.cat([normal(100), 1e6 * half_zeros(77), constant(300)])
    scales, codes, left = encoded(x, [100, 77, 300], 256, kind)
    alone = [encoded(part, [part.numel()], 256, kind) for part in x.split([100, 77, 300])]
    for whole, pieces in zip((scales, codes, left), zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))


@every_kind
@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(kind: BlockKind, dtype: torch.dtype) -> None:
    x = normal(1000).to(dtype)
    scales, codes, left = encoded(x, [1000], 64, kind)
    expected = encoded(x, [1000], 64, kind, encode_blocks.plain)
    assert torch.equal(scales, expected[0])
    assert torch.equal(codes, expected[1])
    assert torch.equal(left, expected[2])
    out = torch.zeros_like(x)
    add_blocks(scales, codes, ScaledBlocks((1000,), 64, kind), out, 1.0)
    assert torch.equal(x - out, left)


def test_sizes_that_do_not_fit_raise() -> None:
    scales, codes = torch.empty(2), torch.empty(100, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"are \(100, 2, 100\), but \(100, 1, 100\) for int8 in 256s"):
        encode_blocks(torch.zeros(100), ScaledBlocks((100,), 256, "int8"), scales, codes, left=False)
    with pytest.raises(ValueError, match="elements, blocks and bytes"):
        add_blocks(scales, codes, ScaledBlocks((99,), 50, "int8"), torch.zeros(100), 1.0)
