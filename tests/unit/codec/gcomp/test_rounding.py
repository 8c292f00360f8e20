"""`rounded` against exact arithmetic, and the split that frames are made of."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from gradwire.codec.gcomp import SYMBOLS, histogram, rounded, symbols_of
from tests.support.looped import looped
from tests.unit.codec.gcomp.inputs import any_bits, half_zeros, same_bits, special, there_and_back, thresholds


def exponent_of(value: Tensor) -> int:
    return (int(value.view(torch.int32)) >> 23) & 255


def nearest(value: float, step: Fraction) -> Fraction:
    """The multiple of `step` next to it; Python rounds halves to even."""
    return round(Fraction(value) / step) * step


@looped("bits", [0, 1, 7, 22, 23])
def test_so_many_bits_of_every_value(bits: int) -> None:
    x = any_bits(400)
    for value, found in zip(x, rounded(x, bits, False), strict=True):
        exponent = exponent_of(value)
        if 1 <= exponent <= 253:
            # Of 23 dropped bits the tie goes to the even exponent, which Fraction knows nothing of.
            step = Fraction(2) ** (exponent - 150 + bits)
            if bits < 23 or Fraction(abs(float(value))) != Fraction(3, 2) * step:
                assert Fraction(float(found)) == nearest(float(value), step)
        else:
            assert same_bits(value[None], found[None])


def test_thresholds_are_steps() -> None:
    x = torch.cat([any_bits(300), special(300), half_zeros(300)])
    limits = thresholds(900, 0, 255)
    limits[::2] = (
        ((x.view(torch.int32) >> 23 & 255)[::2] + torch.arange(450) % 30 - 3).clamp(0, 255).to(torch.uint8)
    )
    for flush in (False, True):
        for value, limit, found in zip(x, limits.tolist(), rounded(x, limits, flush), strict=True):
            exponent = exponent_of(value)
            if 1 <= exponent <= 253:
                step = Fraction(2) ** (max(limit, exponent) - 150)
                assert Fraction(float(found)) == nearest(float(value), step)
            elif exponent == 0 and flush:
                assert int(found.view(torch.int32)) == 0
            else:
                assert same_bits(value[None], found[None])


SHORT = {torch.bfloat16: (8, 7), torch.float16: (5, 10)}
"""Bits of exponent and mantissa."""


def all_of(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit type."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@looped("dtype", SHORT)
def test_thresholds_of_short_types_are_steps_of_their_own(dtype: torch.dtype) -> None:
    width, mantissa = SHORT[dtype]
    bias, last = (1 << width - 1) - 1, (1 << width) - 3
    for x in all_of(dtype).split(4096):
        exponents = x.view(torch.int16).int() >> mantissa & (1 << width) - 1
        over = torch.arange(x.numel()) * 7 % (mantissa + 4) - 1
        limits = (exponents + over).clamp(0, 255).to(torch.uint8)
        found = rounded(x, limits, False)
        # Exact in float64, which rounds halves to even as well.
        step = 2.0 ** (torch.maximum(limits.int(), exponents) - bias - mantissa).double()
        expected = (x.double() / step).round() * step
        cut = (exponents >= 1) & (exponents <= last)
        # Of a whole mantissa the tie goes to the even exponent.
        tie = (limits.int() - exponents == mantissa) & (x.double().abs() == 1.5 * step)
        assert torch.equal(found.double()[cut & ~tie], expected[cut & ~tie])
        assert ((found.double() - x.double()).abs() == step / 2)[cut & tie].all()
        assert same_bits(found[~cut], x[~cut])
        assert found[cut].isfinite().all()
        assert same_bits(rounded(found, limits, False), found)


@looped("dtype", SHORT)
def test_bits_of_short_types_are_their_own(dtype: torch.dtype) -> None:
    x = all_of(dtype)
    x = x[x.isfinite()]
    for bits in range(SHORT[dtype][1] + 1):
        found = rounded(x, bits, False)
        assert found.isfinite().all()
        assert same_bits(rounded(found, bits, False), found)
        normal = (x.abs() >= torch.finfo(dtype).smallest_normal) & (x.abs() < torch.finfo(dtype).max / 4)
        assert not (found[normal].view(torch.int16) & (1 << bits) - 1).any()
        error = (found.double() - x.double()).abs()[normal] / x.double().abs()[normal]
        assert error.max() <= 2.0 ** (bits - 1 - SHORT[dtype][1])


def test_rounding_up_into_the_exponent_comes_back() -> None:
    # The receiver computes one dropped bit fewer than the sender had, and the mantissa is zero anyway.
    below_two = torch.nextafter(torch.tensor([2.0, 1.0, 2.0**126]), torch.tensor(0.0))
    for over in range(1, 30):
        limits = torch.tensor([127, 126, 252], dtype=torch.uint8) + min(over, 3)
        assert same_bits(
            there_and_back(below_two, limits, explicit=False, flush=True), rounded(below_two, limits, True)
        )
        limits = torch.full((3,), min(255, 127 + over), dtype=torch.uint8)
        assert same_bits(
            there_and_back(below_two, limits, explicit=False, flush=True), rounded(below_two, limits, True)
        )


def test_no_finite_value_becomes_infinite() -> None:
    x = torch.tensor([3.4e38, -3.4028235e38, 1.7014117e38])
    for bits in range(24):
        assert rounded(x, bits, True).isfinite().all()


def test_rounding_twice_is_rounding_once() -> None:
    # Or a value that is passed on would change on its way.
    x, limits = torch.cat([any_bits(5000), special(5000)]), thresholds(10_000, 0, 255)
    for dropped in (0, 5, 23, limits):
        once = rounded(x, dropped, True)
        assert same_bits(rounded(once, dropped, True), once)


def test_symbols_count_what_is_sent() -> None:
    x = torch.cat([any_bits(3000), half_zeros(1000)])
    for flush in (False, True):
        exponents = (rounded(x, 9, flush).view(torch.int32) >> 23 & 255).tolist()
        tiny = [
            not flush and e == 0 and int(w) != 0 for e, w in zip(exponents, x.view(torch.int32), strict=True)
        ]
        expected = [254 if t else 255 if e >= 254 else e for e, t in zip(exponents, tiny, strict=True)]
        assert symbols_of(x, 9, flush=flush).tolist() == expected
        counts = histogram(x, 9, flush=flush)
        assert counts.tolist() == [expected.count(symbol) for symbol in range(SYMBOLS)]
