"""Stochastic levels: the kernels against the reference, and the reference against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gradwire.kernels.layouts import Grid, Norm, step_type, unpack_codes
from gradwire.kernels.noise import random_words
from gradwire.kernels.stochastic import add_quantized, quantize
from tests.support.inputs import FINITE, KINDS, heavy_tail, normal
from tests.support.looped import looped
from tests.support.tiers import rest

Kind = Callable[[int], Tensor]
UNITS = ((0,), (1,), (7,), (1000,), (513, 0, 3, 4099), (9001, 100))
BUCKETS = (None, 512, 5, 32, 5000)
every_kind = looped("kind", KINDS)
finite_kinds = looped("kind", FINITE)
every_width = looped("bits", [2, 4, 8])
every_norm = looped("norm", ["l2", "max"])
KEY = 0x123456789ABCDEF


def sent(x: Tensor, grid: Grid, *, key: int = KEY, subtract: bool = False) -> tuple[Tensor, Tensor]:
    """Steps and codes; the memory that they are written to is full of something else."""
    steps = torch.full((grid.buckets,), 9.0, dtype=step_type(x.dtype))
    codes = torch.full((grid.code_bytes,), 0xA5, dtype=torch.uint8)
    quantize(x, grid, key, steps, codes, subtract=subtract)
    return steps, codes


def by_reference(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    steps = torch.full((grid.buckets,), 9.0, dtype=step_type(x.dtype))
    codes = torch.full((grid.code_bytes,), 0xA5, dtype=torch.uint8)
    quantize.plain(x, grid, KEY, steps, codes)
    return steps, codes


def decoded(steps: Tensor, codes: Tensor, grid: Grid, like: Tensor) -> Tensor:
    out = torch.zeros_like(like)
    add_quantized(steps, codes, grid, out, 1.0)
    return out


def quantized(x: Tensor, grid: Grid, key: int = KEY) -> Tensor:
    """What arrives of x."""
    return decoded(*sent(x, grid, key=key), grid, x)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@every_kind
@every_width
@pytest.mark.parametrize("sizes", rest(UNITS, but=[(1,), (513, 0, 3, 4099)]), ids=str)
def test_kernels_do_as_the_reference_does(kind: Kind, bits: int, sizes: tuple[int, ...]) -> None:
    x = kind(sum(sizes))
    for bucket in BUCKETS:
        for norm, clip in (("l2", math.inf), ("max", math.inf), ("max", 2.5)):
            grid = Grid(sizes, bucket, bits, norm, clip)
            expected = by_reference(x, grid)
            left = x.clone()
            found = sent(left, grid, subtract=True)
            assert same(found[0], expected[0]), (grid, "steps")
            assert torch.equal(found[1], expected[1]), (grid, "codes")
            for weight, out in ((-1.0, left), (0.3, x.clone())):
                target = x.clone()
                add_quantized.plain(*expected, grid, target, weight)
                if out is not left:
                    add_quantized(*found, grid, out, weight)
                assert same(out, target), (grid, weight)


@every_width
@every_norm
def test_reference_is_exact_arithmetic(bits: int, norm: Norm) -> None:
    # Rationals, but for the norm's square root: it is taken from the steps, after a check to 2^-22.
    sizes, bucket = (50, 21), 20
    x, grid = heavy_tail(71), Grid((50, 21), bucket, bits, norm)
    steps, packed = by_reference(x, grid)
    noise = random_words(KEY, 71) >> 8
    start = number = place = 0
    for size in sizes:
        for first in range(start, start + size, bucket):
            row = x[first : min(first + bucket, start + size)]
            length = row.double().norm() if norm == "l2" else row.double().abs().max()
            assert float(steps[number]) == pytest.approx(float(length) / grid.levels, rel=2**-22)
            row_bytes = -(-row.numel() * bits // 8)
            codes = unpack_codes(packed[place : place + row_bytes], bits, row.numel())
            for i, code in enumerate(codes.tolist()):
                level = Fraction(float(row[i])) / Fraction(float(steps[number]))
                exact = level + Fraction(int(noise[first + i]), 2**24)
                signed = code - (1 << bits if code > grid.levels else 0)
                # The quotient is rounded: where the sum is as near to an integer, either is right.
                assert signed in {
                    math.floor(exact - Fraction(1, 2**16)),
                    math.floor(exact + Fraction(1, 2**16)),
                }
            number, place = number + 1, place + row_bytes
        start += size


@finite_kinds
@every_width
@every_norm
@looped("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_no_element_moves_by_more_than_a_step(kind: Kind, bits: int, norm: Norm, dtype: torch.dtype) -> None:
    x = kind(3000).double().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    grid = Grid((1000, 2000), 100, bits, norm)
    steps, codes = sent(x, grid)
    moved = (decoded(steps, codes, grid, x).double() - x.double()).abs()
    step = steps.double().repeat_interleave(100)
    # 2^-20: roundings of a level and of its product; in a short type that of the result, 2 eps.
    rounding = 2**-20 * grid.levels * step + 2 * torch.finfo(dtype).eps * (x.double().abs() + step)
    assert (moved <= step + rounding + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).all()


@every_width
@every_norm
def test_many_draws_are_right_in_the_mean(bits: int, norm: Norm) -> None:
    x, draws = heavy_tail(40), 4000
    grid = Grid((40,), 16, bits, norm)
    steps = sent(x, grid)[0].double()
    total = torch.zeros(40, dtype=torch.float64)
    for key in range(draws):
        total += quantized(x, grid, key)
    # A level is a fair coin at worst: half a step of deviation.
    sigma = steps.repeat_interleave(16)[:40] / 2 / draws**0.5
    assert ((total / draws - x).abs() <= 4 * sigma).all()


@every_width
@every_norm
@finite_kinds
def test_powers_of_two_move_exponents_only(bits: int, norm: Norm, kind: Kind) -> None:
    # Large enough that nothing falls below the normal range, and small enough that nothing overflows.
    x = torch.where(kind(2000).abs() > 1e-3, kind(2000), 0.0).clamp(-1e6, 1e6)
    grid = Grid((1500, 500), 512, bits, norm)
    steps, codes = sent(x, grid)
    for power in (-60, -16, 1, 10, 60):
        scaled_steps, scaled_codes = sent(x * 2.0**power, grid)
        assert torch.equal(scaled_codes, codes)
        assert torch.equal(scaled_steps, steps * 2.0**power)


@every_width
@every_norm
@looped("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_largest_and_smallest_numbers_stay_numbers(bits: int, norm: Norm, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (info.max, info.smallest_normal, info.smallest_normal * info.eps):
        x = torch.full((600,), value, dtype=dtype)
        x[::2] *= -1
        for number in (0, 7):
            x[number] = 0.0
        found = quantized(x, Grid((600,), 512, bits, norm))
        assert found.isfinite().all()
        assert (found[[0, 7]] == 0).all()
        assert (found * x >= 0).all()


@every_width
@every_norm
def test_one_of_a_kind_arrives_as_it_is(bits: int, norm: Norm) -> None:
    # Alone in its bucket an element is its norm, up to the rounding of a quotient and a product.
    x = torch.zeros(1024)
    x[5], x[700] = 3.7e-39, -2.5e38
    torch.testing.assert_close(quantized(x, Grid((1024,), 512, bits, norm)), x, rtol=2**-22, atol=2**-142)


@looped("bad", [torch.nan, torch.inf, -torch.inf])
@every_width
@every_norm
@looped("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_poison_fills_its_bucket_and_no_other(bits: int, norm: Norm, bad: float, dtype: torch.dtype) -> None:
    x = normal(2000).to(dtype)
    x[700] = bad
    found = quantized(x, Grid((1000, 1000), 300, bits, norm))
    assert found[600:900].isnan().all()
    assert torch.cat([found[:600], found[900:]]).isfinite().all()


@every_width
@every_norm
def test_parts_know_nothing_of_each_other(bits: int, norm: Norm) -> None:
    x = normal(1300)
    changed = x.clone()
    changed[700:] = 1e9
    for bucket in (None, 512):
        grid = Grid((700, 600), bucket, bits, norm)
        assert torch.equal(quantized(x, grid)[:700], quantized(changed, grid)[:700])
        changed[700:] = 0.0
        assert not quantized(changed, grid)[700:].any()


def test_zeros_are_a_payload() -> None:
    grid = Grid((100, 30), 32, 4)
    out = torch.ones(130)
    nothing = torch.zeros(grid.buckets), torch.zeros(grid.code_bytes, dtype=torch.uint8)
    add_quantized(*nothing, grid, out, 1.0)
    assert torch.equal(out, torch.ones(130))


def test_clipping_cuts_what_is_beyond_so_many_deviations() -> None:
    x = normal(10_000)
    x[17] = 1000.0
    grid = Grid((10_000,), None, 2, "max", clip=2.5)
    found = quantized(x, grid)
    deviation = float(x.double().square().mean().sqrt())
    assert float(found.max()) == pytest.approx(2.5 * deviation, rel=1e-6)
    assert found[17] == found.max()
    wide = Grid((10_000,), None, 2, "max", clip=1e9)
    assert torch.equal(quantized(x, wide), quantized(x, Grid((10_000,), None, 2, "max")))


@looped("subtract", [False, True])
def test_a_strided_view_takes_the_reference_path(subtract: bool) -> None:
    x, grid = normal(2000), Grid((600, 400), 512, 4)
    view, dense = x.clone()[::2], x[::2].clone()
    a, b = sent(view, grid, subtract=subtract), sent(dense, grid, subtract=subtract)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert torch.equal(view, dense)


def test_input_is_only_read_unless_something_is_subtracted() -> None:
    x, grid = normal(3000), Grid((3000,), 512, 8)
    before = x.clone()
    sent(x, grid)
    assert torch.equal(x, before)
    steps, codes = sent(x, grid, subtract=True)
    assert torch.equal(x, before - decoded(steps, codes, grid, x))


@looped(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits=3; choose 2, 4 or 8"),
        ({"bucket": 0}, "bucket=0 must be at least 1"),
        ({"norm": "l1"}, "norm='l1'; choose"),
        ({"clip": 0.0}, "clip=0.0 must be positive"),
        ({"clip": math.nan}, "clip=nan must be positive"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**{"sizes": (5,), "bucket": 4, "bits": 8, **arguments})  # type: ignore[arg-type]


def test_buffers_that_do_not_fit_are_refused() -> None:
    grid = Grid((5,), 4, 8)
    steps, codes = torch.empty(2), torch.empty(5, dtype=torch.uint8)
    for x, s, c in (
        (torch.zeros(6), steps, codes),
        (torch.zeros(5), steps[:1], codes),
        (torch.zeros(5), steps, codes[:4]),
        (torch.zeros(5), steps.double(), codes),
        (torch.zeros(5), steps, codes.view(torch.int8)),
    ):
        with pytest.raises(ValueError, match="needs"):
            quantize(x, grid, 0, s, c)
        with pytest.raises(ValueError, match="needs"):
            add_quantized(s, c, grid, x, 1.0)
