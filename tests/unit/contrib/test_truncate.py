"""Truncation as a codec. The arithmetic is tested with the kernels."""

from __future__ import annotations

import pytest
import torch

from gradwire.contrib.truncate import upper_bits
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped

AT = ExchangeContext(step=0, unit=0, rank=0, world=1)


def test_the_bias_is_what_the_docstring_says() -> None:
    # Mantissas that are equally likely: uniform numbers of 1 … 2. 10^6 of them, so within 1 % of the mean.
    x = 1.0 + torch.rand(10**6, generator=torch.Generator().manual_seed(1))
    for bits in (12, 18, 20):
        left = x.clone()
        upper_bits(bits).take(left, AT)
        lost = float(left.double().sum() / x.double().sum())
        assert lost == pytest.approx(2.0 ** (bits - 24) / 1.5, rel=0.01)


def test_float64_beyond_the_range_of_float32_arrives_as_its_largest_number() -> None:
    x, out = torch.tensor([1e300, -torch.inf], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    upper_bits(18).add_decoded(upper_bits(18).take(x, AT), out, 1.0, AT)
    assert out.tolist() == [pytest.approx(torch.finfo(torch.float32).max, rel=2.0**-5), -torch.inf]
    assert float(x[0]) == 1e300 - float(out[0])


@looped("bits", [0, 23])
def test_bits_outside_their_range_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits={bits} is outside 1 … 22"):
        upper_bits(bits)
