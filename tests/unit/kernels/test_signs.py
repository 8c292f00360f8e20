"""One bit per element and its levels, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels.layouts import Blocks, unpack_codes
from gradwire.kernels.signs import add_signs, pack_signs
from tests.support.inputs import FINITE, KINDS, normal
from tests.support.looped import looped

PARTS = ((0,), (1,), (2,), (7,), (8,), (127,), (4096,), (4097,), (9001, 0, 5, 130, 1), (3, 3, 8192, 61))
F32 = torch.float32

every_parts = looped("sizes", PARTS)
every_block = looped("block", [None, 8, 64, 4104])
every_kind = looped("kind", KINDS)
either = looped("number", [1, 2])


def room(blocks: Blocks, number: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """Levels and bytes, filled with what must not stay."""
    return torch.full((blocks.count, number), torch.nan, dtype=dtype), torch.full(
        (blocks.bytes,), 0xA5
    ).byte()


def slowly(x: Tensor, blocks: Blocks, number: int) -> tuple[Tensor, Tensor]:
    levels, packed = room(blocks, number)
    pack_signs.plain(x, blocks, levels, packed, leave=False)
    return levels, packed


@either
@every_parts
@every_block
@every_kind
def test_bits_of_the_reference_and_levels_within_a_rounding(kind, block, sizes, number) -> None:
    blocks = Blocks(sizes, block)
    x = kind(blocks.numel)
    left, (levels, packed) = x.clone(), room(blocks, number)
    pack_signs(left, blocks, levels, packed, leave=True)
    expected_levels, expected = slowly(x, blocks, number)
    assert torch.equal(packed, expected)
    # Sums in float64 of other orders, rounded once to float32: neighbours at most.
    torch.testing.assert_close(levels, expected_levels, rtol=2.0**-23, atol=2.0**-149, equal_nan=True)
    expected_left = x.clone()
    add_signs.plain(levels, packed, blocks, expected_left, -1.0)
    torch.testing.assert_close(left, expected_left, rtol=0, atol=0, equal_nan=True)


@either
@every_parts
@every_block
def test_decoding_equals_the_reference_to_the_last_bit(block, sizes, number) -> None:
    blocks = Blocks(sizes, block)
    levels, packed = slowly(normal(blocks.numel), blocks, number)
    for weight in (1.0, -1.0, 1 / 3):
        out = normal(blocks.numel + 1)[1:]
        expected = out.clone()
        add_signs(levels, packed, blocks, out, weight)
        add_signs.plain(levels, packed, blocks, expected, weight)
        assert torch.equal(out, expected)


def test_by_hand() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -0.0, 0.0] + [-1.0] * 4)
    one, packed = room(Blocks((5, 4)), 1)
    pack_signs(x, Blocks((5, 4)), one, packed)
    assert unpack_codes(packed[:1], 1, 5).tolist() == [
        1,
        0,
        1,
        1,
        1,
    ]  # a zero of either sign counts as positive
    assert packed.tolist() == [0b11101, 0]
    assert torch.equal(one, torch.tensor([[1.2], [1.0]]))
    two, packed = room(Blocks((5, 4)), 2)
    pack_signs(x, Blocks((5, 4)), two, packed, leave=True)
    assert two.tolist() == [[1.0, -2.0], [0.0, -1.0]]
    assert x.tolist() == [0.0, 0.0, 2.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


@either
@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype, number: int) -> None:
    blocks = Blocks((101, 30), 16)
    x = normal(131).to(dtype)
    levels, packed = room(blocks, number, torch.float64 if dtype == torch.float64 else F32)
    before = x.clone()
    pack_signs(x, blocks, levels, packed, leave=True)
    add_signs(levels, packed, blocks, x)
    # Taken away and put back: two roundings of numbers below 8.
    torch.testing.assert_close(x, before, rtol=0, atol=16 * torch.finfo(dtype).eps)


@either
@looped("dtype", [torch.float32, torch.float64])
def test_the_largest_numbers_do_not_overflow(dtype: torch.dtype, number: int) -> None:
    largest, blocks = torch.finfo(dtype).max, Blocks((5000,))
    x, (levels, packed) = torch.full((5000,), largest, dtype=dtype), room(blocks, number, dtype)
    pack_signs(x, blocks, levels, packed, leave=True)
    assert levels[0, 0] == largest
    assert not x.any()


@either
@looped("kind", FINITE)
def test_powers_of_two_move_exponents_only(kind, number: int) -> None:
    blocks, x = Blocks((5000,), 512), kind(5000).clamp(-1e30, 1e30)
    x = torch.where(x.abs() < 1e-30, 0.0, x)
    (levels, packed), (scaled, same) = room(blocks, number), room(blocks, number)
    pack_signs(x, blocks, levels, packed)
    pack_signs(x * 2.0**-10, blocks, scaled, same)
    assert torch.equal(scaled, levels * 2.0**-10)
    assert torch.equal(same, packed)


def test_slices_of_larger_memory_are_written_nowhere_else() -> None:
    buffer, blocks = torch.full((5002,), 7.0), Blocks((5000,))
    x, (levels, packed) = normal(5000), room(blocks, 1)
    buffer[1:-1] = x
    pack_signs(buffer[1:-1], blocks, levels, packed, leave=True)
    add_signs(levels, packed, blocks, buffer[1:-1], 2.0)
    assert buffer[0] == buffer[-1] == 7.0


@looped("block", [0, -8, 4, 12])
def test_blocks_are_of_whole_bytes(block: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Blocks((10,), block)


@looped("which", range(3))
def test_unequal_sizes_raise_instead_of_writing_beyond_the_end(which: int) -> None:
    sizes = [10, 1, 2]
    sizes[which] += 1
    x, levels, packed = (torch.zeros(size) for size in sizes)
    with pytest.raises(ValueError, match=r"fit|need levels"):
        pack_signs(x, Blocks((10,)), levels.view(-1, 1), packed.byte())
