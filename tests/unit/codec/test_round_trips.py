"""What has been decoded is encoded to the same bytes, and decoding has no memory: over drawn layouts."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.codec.blocks import blocks
from gradwire.codec.levels import four_levels
from gradwire.codec.signs import TwoLevels, one_bit, sign
from gradwire.codec.sparse import SparseLayout
from gradwire.contrib.oktopk import Slots
from gradwire.contrib.stochastic_levels import qsgd_codec
from gradwire.contrib.truncate import upper_bits
from gradwire.kernels.layouts import Blocks
from gradwire.step.context import ExchangeContext
from tests.support.whole import parts_of

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**32)
EXPONENTS = st.integers(-60, 60)
WIDTHS = st.integers(1, 80)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
few = settings(max_examples=60, deadline=None, derandomize=True)


def at_parts(sizes: list[int]) -> ExchangeContext:
    return ExchangeContext(step=2, unit=0, rank=1, world=3, parts=parts_of(*sizes))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(codec: Codec, payload: Tensor, like: Tensor, ctx: ExchangeContext) -> Tensor:
    """Into zeros, twice: the payload stays as it is, and bits are the same."""
    before, found = payload.clone(), []
    for _ in range(2):
        out = torch.zeros_like(like)
        codec.add_decoded(payload, out, 1.0, ctx)
        found.append(out)
    assert same_bytes(*found)
    assert torch.equal(payload, before)
    return found[0]


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def whole_blocks(codes: Tensor, largest: float, sizes: list[int], block: int) -> Tensor:
    """`codes` with the largest at one place of every block, so that a scale is known; no -0."""
    start = 0
    for size in sizes:
        for first in range(start, start + size, block):
            codes[first] = largest
        start += size
    return codes + 0.0


def comes_back(codec: Codec, x: Tensor, sizes: list[int]) -> None:
    """On its own grid nothing is rounded, and there is nothing to draw."""
    ctx = at_parts(sizes)
    payload = codec.encode(x, ctx)
    out = decoded(codec, payload, x, ctx)
    assert torch.equal(out, x)
    assert torch.equal(codec.encode(out, ctx), payload)


@few
@given(SIZES, WIDTHS, st.sampled_from([("int8", 127), ("int4", 7)]), EXPONENTS, SEEDS)
@example([3, 0, 5], 3, ("int4", 7), 0, 0)
def test_integers_in_blocks(
    sizes: list[int], block: int, kind: tuple[str, int], exponent: int, seed: int
) -> None:
    name, largest = kind
    codes = torch.randint(-largest, largest + 1, (sum(sizes),), generator=generator(seed)).float()
    x = whole_blocks(codes, largest, sizes, block) * 2.0**exponent
    comes_back(blocks(name, block), x, sizes)  # type: ignore[arg-type]


@few
@given(SIZES, st.sampled_from([8, 16, 64]), EXPONENTS, SEEDS)
def test_two_magnitudes_in_blocks(sizes: list[int], block: int, exponent: int, seed: int) -> None:
    codes = torch.randint(0, 4, (sum(sizes),), generator=generator(seed))
    x = torch.tensor([1.0, -1.0, 3.0, -3.0])[codes] * 2.0**exponent
    comes_back(four_levels(block), x, sizes)


@few
@given(SIZES, WIDTHS, EXPONENTS, SEEDS)
def test_e4m3_in_blocks(sizes: list[int], block: int, exponent: int, seed: int) -> None:
    codes = torch.randint(0, 256, (sum(sizes),), generator=generator(seed)).byte().view(torch.float8_e4m3fn)
    x = whole_blocks(codes.float().nan_to_num(1.0), 448.0, sizes, block) * 2.0**exponent
    comes_back(blocks("fp8", block), x, sizes)


@few
@given(SIZES, WIDTHS, st.sampled_from([2, 4, 8]), EXPONENTS, SEEDS)
@example([5, 2], 3, 2, 0, 0)
def test_qsgds_codes(sizes: list[int], bucket: int, bits: int, exponent: int, seed: int) -> None:
    levels = 2 ** (bits - 1) - 1
    codes = torch.randint(-levels, levels + 1, (sum(sizes),), generator=generator(seed)).float()
    # Buckets are no longer than the longest part.
    width = max(1, min(bucket, max(sizes)))
    x = whole_blocks(codes, levels, sizes, width) * 2.0**exponent
    comes_back(qsgd_codec(bits, bucket, "max"), x, sizes)


@few
@given(SIZES, st.sampled_from([None, 8, 16]), st.sampled_from([sign, one_bit]), DTYPES, SEEDS)
def test_signs(sizes: list[int], block: int | None, make: object, dtype: torch.dtype, seed: int) -> None:
    codec, ctx = make(block), at_parts(sizes)  # type: ignore[operator]
    assert isinstance(codec, TwoLevels)
    x = torch.randn(sum(sizes), generator=generator(seed)).to(dtype)
    payload = codec.encode(x, ctx)
    again = codec.encode(decoded(codec, payload, x, ctx), ctx)
    grid, wide = Blocks(tuple(sizes), block), torch.float64 if dtype == torch.float64 else torch.float32
    start = grid.count * codec.levels * wide.itemsize
    assert torch.equal(again[start:], payload[start:])
    # A mean of up to 70 equal numbers: as many roundings of the sum, one of the quotient, and one to x's
    # type when it was decoded.
    rounding = 71 * torch.finfo(wide).eps + torch.finfo(dtype).eps
    torch.testing.assert_close(again[:start].view(wide), payload[:start].view(wide), rtol=rounding, atol=0)


@few
@given(
    st.lists(st.floats(width=32, allow_nan=False), max_size=150), st.booleans(), st.integers(1, 22), DTYPES
)
@example([float("inf"), -1e-40, -0.0, 65520.0], True, 22, torch.float16)
def test_the_upper_bits(numbers: list[float], poisoned: bool, bits: int, dtype: torch.dtype) -> None:
    x = torch.tensor([*numbers, *([torch.nan] if poisoned else [])], dtype=torch.float32).to(dtype)
    # A zero that is added to loses its sign.
    x = torch.where(x.double().abs() < torch.finfo(torch.float32).smallest_normal, x.abs(), x)
    codec, ctx = upper_bits(bits), at_parts([x.numel()])
    payload = codec.encode(x, ctx)
    out = decoded(codec, payload, x, ctx)
    assert torch.equal(out.isnan(), x.isnan())
    again = codec.encode(out, ctx)
    # Arithmetic may give a NaN other bits, but only once.
    assert poisoned or torch.equal(again, payload)
    assert torch.equal(codec.encode(decoded(codec, again, x, ctx), ctx), again)


@few
@given(st.integers(1, 300), st.data(), DTYPES, SEEDS)
def test_places_and_values(numel: int, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    picked = sorted(data.draw(st.sets(st.integers(0, numel - 1))))
    values = torch.randn(len(picked), generator=generator(seed)).to(dtype)
    layout = SparseLayout(len(picked), numel, dtype)
    payload = layout.write(torch.tensor(picked, dtype=torch.int64), values)
    for _ in range(2):
        places, found = layout.read(payload)
        assert places.tolist() == picked
        assert torch.equal(found, values)
    assert torch.equal(layout.write(places.long(), found), payload)


@few
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 10), DTYPES, SEEDS)
def test_slots_that_are_full_or_not(picked: list[int], room: int, dtype: torch.dtype, seed: int) -> None:
    slots = Slots(len(picked) + room, dtype)
    values = torch.randn(len(picked), generator=generator(seed)).to(dtype)
    payload, again = (torch.zeros(slots.bytes, dtype=torch.uint8) for _ in range(2))
    slots.write(payload, torch.tensor(picked, dtype=torch.int64), values)
    for _ in range(2):
        places, found = slots.read(payload, 0, 2**31)
        assert places.tolist() == picked
        assert torch.equal(found, values)
    slots.write(again, places, found)
    assert torch.equal(again, payload)
