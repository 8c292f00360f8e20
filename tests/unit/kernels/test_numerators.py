"""Numerators, their exponents and levels: kernels against the reference, and both against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gradwire.kernels.terms import Terms, mantissa_levels, numerator_exponents, numerators
from tests.support.inputs import KINDS
from tests.support.looped import looped

SIZES = (0, 1, 2, 511, 512, 513, 5000)
TERMS = (
    Terms(offset=1000.0),
    Terms(offset=-0.3, pull=2.5),
    Terms(slope=300.0, offset=-0.01, share=0.99, eps=1e-8),
    Terms(slope=1e4, pull=9.0, share=0.999 / (1 - 0.999**7), eps=1e-8),
    Terms(slope=1e38, offset=1e300, pull=1e-300),
    Terms(),
)


def moments(n: int, draw: int) -> tuple[Tensor | None, Tensor | None]:
    """A second and a first moment, or none."""
    random = torch.Generator().manual_seed(n)
    square, momentum = torch.rand(n, generator=random) ** 4, torch.randn(n, generator=random)
    return (square if draw & 1 else None), (momentum if draw & 2 else None)


@looped("draw", range(4))
@looped("terms", TERMS)
@looped("kind", KINDS)
def test_the_kernels_give_the_bits_of_the_reference(kind: object, terms: Terms, draw: int) -> None:
    for n in SIZES:
        parameter, (square, momentum) = kind(n), moments(n, draw)  # type: ignore[operator]
        values, exponents = torch.empty(n), torch.empty(n, dtype=torch.uint8)
        numerators(parameter, square, momentum, terms, values)
        numerator_exponents(parameter, square, momentum, terms, exponents)
        expected, expected_exponents = torch.empty(n), torch.empty(n, dtype=torch.uint8)
        numerators.plain(parameter, square, momentum, terms, expected)
        numerator_exponents.plain(parameter, square, momentum, terms, expected_exponents)
        assert torch.equal(values, expected)
        assert torch.equal(exponents, expected_exponents)


def exact(parameter: float, square: float, momentum: float, terms: Terms) -> Fraction:
    """The same in exact arithmetic, but for the root, which is taken in 200 bits."""
    scaled = Fraction(square) * Fraction(terms.share) * 4**200
    root = Fraction(math.isqrt(math.floor(scaled)), 2**200) + Fraction(terms.eps)
    return Fraction(parameter) * (Fraction(terms.slope) * root + Fraction(terms.offset)) - Fraction(
        terms.pull
    ) * Fraction(momentum)


@looped("terms", TERMS[:4])
def test_exponents_and_values_never_exceed_exact_arithmetic(terms: Terms) -> None:
    random = torch.Generator().manual_seed(3)
    n = 300
    parameter = torch.randn(n, generator=random) * 2.0 ** torch.randint(-20, 20, (n,), generator=random)
    square, momentum = moments(n, 3)
    assert square is not None
    assert momentum is not None
    values, exponents = torch.empty(n), torch.empty(n, dtype=torch.uint8)
    numerators(parameter, square, momentum, terms, values)
    numerator_exponents(parameter, square, momentum, terms, exponents)
    for i in range(n):
        terms_exact = [float(parameter[i]), float(square[i]), float(momentum[i])]
        true = abs(exact(*terms_exact, terms))
        # Of float64's six roundings, relative to what is subtracted from each other.
        slack = 6 * Fraction(1, 2**52) * (true + 2 * Fraction(terms.pull) * abs(Fraction(terms_exact[2])))
        assert Fraction(float(values[i])) <= true
        assert Fraction(float(values[i])) >= true * (1 - Fraction(1, 2**22)) - slack
        if exponents[i]:
            assert Fraction(2) ** (int(exponents[i]) - 127) <= true + slack
            assert Fraction(2) ** (int(exponents[i]) - 126) > true - slack


def test_what_is_not_finite_or_too_small_has_exponent_0() -> None:
    parameter = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 2.0**-127, 2.0**-126, 2.0**127])
    exponents, values = torch.empty(7, dtype=torch.uint8), torch.empty(7)
    numerator_exponents(parameter, None, None, Terms(offset=1.0), exponents)
    assert exponents.tolist() == [0, 0, 0, 0, 0, 1, 254]
    numerator_exponents(parameter, None, None, Terms(offset=2.0**40), exponents)
    assert exponents.tolist() == [0, 0, 0, 0, 40, 41, 255]
    numerators(parameter, None, None, Terms(offset=1.0), values)
    assert values[:4].tolist() == [0.0] * 4


@looped("kind", KINDS)
def test_levels_are_the_largest_with_the_gradient_that_far_below(kind: object) -> None:
    for n in SIZES:
        x = kind(n)  # type: ignore[operator]
        limit = torch.rand(n, generator=torch.Generator().manual_seed(1)) * 2.0 ** (torch.arange(n) % 30)
        found = torch.empty(n, dtype=torch.uint8)
        mantissa_levels(x, limit, found)
        expected = torch.empty(n, dtype=torch.uint8)
        mantissa_levels.plain(x, limit, expected)
        assert torch.equal(found, expected)
        for value, bound, level in zip(x.tolist(), limit.tolist(), found.tolist(), strict=True):
            if math.isfinite(value):
                below = [each for each in (6, 12, 18) if Fraction(abs(value)) * 2**each < Fraction(bound)]
                assert level == max([0, *below])
            else:
                assert level == 0


def test_wrong_shapes_and_types_are_refused() -> None:
    x, out = torch.ones(4), torch.empty(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="shape"):
        numerator_exponents(x, torch.ones(3), None, Terms(), out)
    with pytest.raises(ValueError, match="float32"):
        numerators(x, None, None, Terms(), out)
    with pytest.raises(ValueError, match="uint8"):
        mantissa_levels(x, x, x)
