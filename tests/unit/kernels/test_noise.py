"""Counted noise: kernels' words against the reference's, and these against independent uniform words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.kernels.cpu.noise import random_word
from gradwire.kernels.noise import halves, random_words
from tests.support.looped import looped

KEYS = (0, 1, 2**32, 2**63 - 1, 0x123456789ABCDEF)
N = 2**18
every_key = looped("key", KEYS)


def uniform(key: int, start: int = 0) -> Tensor:
    """As kernels use the words: 24 bits, centred, with variance 1."""
    return ((random_words(key, N, start) >> 8).double() / 2**24 - 0.5) * 12**0.5


def correlation(a: Tensor, b: Tensor) -> float:
    """Times √n: a standard normal number if there is none."""
    return float((a * b).sum() / a.numel() ** 0.5)


@every_key
@looped("start", [0, 1, 4097, 2**31 - 5, 2**32 - 5, 2**40 + 3])
def test_words_of_kernels_are_those_of_the_reference(key: int, start: int) -> None:
    low, high = map(np.uint32, halves(key))
    found = [int(random_word(start + i, low, high)) for i in range(20)]
    assert found == random_words(key, 20, start).tolist()


def test_a_word_depends_on_key_and_index_alone() -> None:
    words = random_words(9, 100)
    assert torch.equal(random_words(9, 60, start=40), words[40:])
    assert torch.equal(random_words(9, 100, start=2**32), words)
    assert 0 <= int(words.min()) <= int(words.max()) < 2**32


@every_key
@looped("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(key: int, shift: int) -> None:
    counts = torch.bincount(random_words(key, N) >> shift & 0xFF, minlength=256).double()
    chi_square = float(((counts - N / 256).square() / (N / 256)).sum())
    # 255 degrees of freedom: mean 255, variance 510. A fixed key passes or fails for good.
    assert abs(chi_square - 255) <= 4 * 510**0.5


@every_key
def test_pairs_of_neighbours_fill_the_square(key: int) -> None:
    high = random_words(key, N) >> 28
    counts = torch.bincount(16 * high[:-1] + high[1:], minlength=256).double()
    expected = (N - 1) / 256
    assert abs(float(((counts - expected).square() / expected).sum()) - 255) <= 4 * 510**0.5


@every_key
def test_neighbours_are_not_correlated(key: int) -> None:
    u = uniform(key)
    for lag in (1, 2, 3, 16, 64, 512, 4096):
        assert abs(correlation(u[:-lag], u[lag:])) <= 4, lag


@every_key
def test_mean_and_variance_are_those_of_uniform_numbers(key: int) -> None:
    u = uniform(key)
    assert abs(float(u.sum())) / N**0.5 <= 4
    # The fourth moment of a uniform number of variance 1 is 9/5, so its square has variance 4/5.
    assert abs(float((u.square() - 1).sum())) / (0.8 * N) ** 0.5 <= 4


@pytest.mark.rest
@looped("bit", range(63))
def test_keys_that_differ_in_one_bit_have_nothing_in_common(bit: int) -> None:
    key = KEYS[-1]
    a, b = random_words(key, N), random_words(key ^ 1 << bit, N)
    assert abs(correlation(uniform(key), uniform(key ^ 1 << bit))) <= 4.5  # one of 63 beyond 4.5: 1 in 2000
    # Two of them coincide by chance at an index once in 2^32.
    assert int((a == b).sum()) <= 2


@pytest.mark.rest
@looped("bit", [0, 1, 5, 9, 17, 30])
def test_one_bit_of_the_index_changes_half_of_the_word(bit: int) -> None:
    index = torch.arange(4096)
    words = random_words(KEYS[-1], 4096)
    others = torch.cat([random_words(KEYS[-1], 1, int(i) ^ 1 << bit) for i in index])
    changed = words ^ others
    share = torch.stack([(changed >> place & 1).double().mean() for place in range(32)])
    assert ((share - 0.5).abs() <= 0.05).all()  # 6 sigma of 4096 fair coins
