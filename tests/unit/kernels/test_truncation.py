"""Upper bits packed lane by lane, against the reference, and the reference against bits by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels.truncation import add_upper, pack_upper, upper_words
from tests.support.inputs import FINITE, KINDS, normal, special
from tests.support.looped import looped

Inputs = Callable[[int], Tensor]
SIZES = (0, 1, 2, 31, 32, 33, 4095, 4096, 4097, 40_009)
DROPS = (1, 6, 12, 15, 16, 17, 18, 22)
every_drop = looped("drop", DROPS)


@every_drop
@looped("draw", KINDS)
def test_words_rest_and_sums_are_those_of_the_reference(drop: int, draw: Inputs) -> None:
    for n in SIZES:
        left, expected_left = draw(n), draw(n)
        words = pack_upper(left, drop, left=True)
        expected = pack_upper.plain(expected_left, drop, left=True)
        assert words.numel() == upper_words(n, drop)
        assert torch.equal(words, expected)
        assert torch.equal(left.nan_to_num(7.0), expected_left.nan_to_num(7.0))
        out, expected = normal(n), normal(n)
        add_upper(words, drop, out, 1 / 3)
        add_upper.plain(words, drop, expected, 1 / 3)
        assert torch.equal(out.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@every_drop
@looped("draw", FINITE)
def test_what_is_decoded_are_the_upper_bits_and_what_is_left_the_lower(drop: int, draw: Inputs) -> None:
    x, left, out = draw(5000), draw(5000), torch.zeros(5000)
    add_upper(pack_upper(left, drop, left=True), drop, out, 1.0)
    expected = (x.view(torch.int32) >> drop << drop).view(torch.float32)
    assert torch.equal(out, expected)
    assert torch.equal(left.double() + out.double(), x.double())
    assert (left.abs().double() <= x.abs().double() * 2.0 ** (drop - 23) + 2.0 ** (drop - 149)).all()


@every_drop
def test_nan_stays_nan_and_inf_stays_inf(drop: int) -> None:
    x = special(4097)
    # The NaN whose payload is in its lowest bit alone: cut off, it would be Inf.
    x[5] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
    out = torch.zeros(4097)
    add_upper(pack_upper(x, drop, left=False), drop, out, 1.0)
    assert x[5].isnan()
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.isinf(), x.isinf())
    assert torch.equal(out[x.isinf()], x[x.isinf()])


def test_words_by_hand() -> None:
    # One lane of 32 rows: codes one after the other, 16 bits each, lowest first.
    words = pack_upper(torch.tensor([1.0, -2.0, 0.5]), 16, left=False)
    assert words.tolist() == [0x3F80 | (0xC000 - 0x10000) << 16, 0x3F00, *[0] * 14]


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    x = normal(1000).to(dtype)
    left, out = x.clone(), torch.zeros_like(x)
    words = pack_upper(left, 18, left=True)
    assert torch.equal(words, pack_upper.plain(x.clone(), 18, left=False))
    add_upper(words, 18, out, 1.0)
    assert torch.equal(left, x - out)


def test_encoding_alone_only_reads() -> None:
    x = normal(1000)
    pack_upper(x, 18, left=False)
    assert torch.equal(x, normal(1000))


def test_numbers_and_sizes_outside_their_range_raise() -> None:
    for drop in (0, 23):
        with pytest.raises(ValueError, match="choose 1 … 22"):
            pack_upper(normal(9), drop, left=False)
    with pytest.raises(ValueError, match="33 elements take 28 int32 words"):
        add_upper(torch.zeros(14, dtype=torch.int32), 18, torch.zeros(33), 1.0)
