"""Indices come back as they went, in the announced number of words, or with an error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codec.indices import (
    elias_fano_planes,
    index_form,
    index_words,
    pack_indices,
    unpack_indices,
)
from gradwire.errors import WireError
from gradwire.kernels.payload import BLOCK, GROUP, MOST_LOW_BITS
from tests.support.looped import looped

PATTERNS = ("uniform", "start", "end", "every other", "run", "ends")


def chosen(pattern: str, count: int, numel: int, seed: int) -> Tensor:
    """`count` of `numel` indices."""
    random = torch.Generator().manual_seed(seed)
    if pattern in ("start", "end"):  # within four times the room that they need
        room = min(numel, 4 * count)
        offset = 0 if pattern == "start" else numel - room
        return torch.randperm(room, generator=random)[:count].sort().values + offset
    if pattern == "every other" and 2 * count <= numel + 1:
        return 2 * torch.arange(count)
    if pattern == "run":
        return torch.arange(count) + seed % (numel - count + 1)
    if pattern == "ends":
        return torch.cat([torch.arange(count // 2), torch.arange(numel - (count + 1) // 2, numel)])
    return torch.randperm(numel, generator=random)[:count].sort().values


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    """(count, numel): any share, small and large, and all edges."""
    numels = st.one_of(st.integers(0, 130), st.integers(0, 20_000))
    return numels.flatmap(lambda numel: st.tuples(st.integers(0, numel) | shares(numel), st.just(numel)))


def shares(numel: int) -> st.SearchStrategy[int]:
    return st.sampled_from([1e-3, 0.01, 0.1, 0.3, 0.5, 1.0]).map(lambda share: round(share * numel))


@given(sizes(), st.sampled_from(PATTERNS), st.integers(0, 2**32), st.sampled_from([torch.int32, torch.int64]))
@settings(deadline=None, max_examples=300)
def test_indices_come_back(size: tuple[int, int], pattern: str, seed: int, dtype: torch.dtype) -> None:
    count, numel = size
    indices = chosen(pattern, count, numel, seed)
    packed = pack_indices(indices.to(dtype), numel)
    assert (packed.dtype, packed.shape) == (torch.int32, (index_words(count, numel),))
    found = unpack_indices(packed, count, numel)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), indices)


@looped("numel", [2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**40 + 7])
@looped("count", [1, 5, 1000])
def test_indices_beyond_32_bits_come_back(numel: int, count: int) -> None:
    step = numel // count
    indices = torch.arange(count) * step + (numel - 1 - (count - 1) * step)
    assert indices[-1] == numel - 1
    found = unpack_indices(pack_indices(indices, numel), count, numel)
    assert found.dtype == (torch.int32 if numel <= 2**31 else torch.int64)
    assert torch.equal(found.long(), indices)


@looped(
    ("count", "numel", "form"),
    [
        (0, 0, "list"),
        (0, 1000, "list"),
        (1, 1, "list"),
        (3, 1000, "list"),
        (3, 40, "bitmap"),
        (100, 10_000, "coded"),
        (3900, 10_000, "coded"),
        (4000, 10_000, "bitmap"),
        (10_000, 10_000, "bitmap"),
        (3, 2**31 + 1, "coded"),
    ],
)
def test_the_shortest_form_is_taken(count: int, numel: int, form: str) -> None:
    assert index_form(count, numel) == form


def bits_per_index(density: float) -> float:
    """Of each of k of n indices, k/n = `density` in (0, 1], when n is large but below 2^31."""
    zeros = 1.0 / density - 1.0
    coded = min(b + 1 + GROUP / BLOCK * (1 + zeros / 2.0**b) for b in range(MOST_LOW_BITS + 1))
    return min(32.0, 1.0 / density, coded)


@looped("share", [1e-4, 1e-3, 0.01, 0.03, 0.1, 0.13, 0.3, 0.39, 0.41, 0.5])
def test_sizes_are_within_8_percent_of_the_entropy(share: float) -> None:
    numel = 32_000_000
    count = round(share * numel)
    log_choices = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    bits = 32 * index_words(count, numel)
    assert bits <= 1.08 * log_choices / math.log(2)
    # Three planes are filled up to words, and the last block; 2 bits for the rounding in n − k.
    assert abs(bits / count - bits_per_index(share)) <= (3 * 31 + 6 + 2) / count


def test_the_number_of_low_bits_is_the_best() -> None:
    for numel in (1, 50, 1000, 4097):
        for count in range(1, numel + 1, max(1, numel // 97)):
            layout = elias_fano_planes(count, numel)
            others = (type(layout)(count, numel, low_bits) for low_bits in range(33))
            assert layout.bits == min(other.bits for other in others)


@looped(
    ("words", "count", "numel", "good"),
    [
        ([1, 7], 2, 1000, True),
        ([1, 1000], 2, 1000, False),
        ([-1, 7], 2, 1000, False),
        ([7, 7], 2, 1000, False),
        ([7, 1], 2, 1000, False),
        ([0b101], 2, 10, True),
        ([0b1], 2, 10, False),
        ([0b111], 2, 10, False),
        ([-1], 2, 10, False),
        ([1 + (1 << 12)], 2, 10, False),
    ],
)
def test_lists_and_bitmaps_are_checked_before_a_kernel_sees_them(words, count, numel, good) -> None:
    packed = torch.tensor(words, dtype=torch.int32)
    if good:
        assert torch.equal(pack_indices(unpack_indices(packed, count, numel), numel), packed)
    else:
        with pytest.raises(WireError, match=f"no choice of {count} of {numel} indices"):
            unpack_indices(packed, count, numel)


@looped("pattern", PATTERNS)
@looped(("count", "numel"), [(20, 1000), (100, 1000), (300, 1000), (450, 1000), (3, 1000)])
def test_flipped_bits_are_noticed_or_make_other_indices(count: int, numel: int, pattern: str) -> None:
    packed = pack_indices(chosen(pattern, count, numel, seed=count), numel)
    noticed = 0
    for bit in range(32 * packed.numel()):
        flipped = packed.clone()
        flipped[bit // 32] ^= torch.tensor(1 << bit % 32).to(torch.int32)
        try:
            found = unpack_indices(flipped, count, numel)
        except WireError:
            noticed += 1
        else:
            assert found.shape == (count,)
            assert (found.diff() > 0).all()
            assert 0 <= found[0] <= found[-1] < numel
    assert noticed > 0


@looped("count", [0, 1, 3, 20, 300, 450, 1000])
@looped("numel", [1000, 2**33])
def test_zeros_of_a_leader_that_failed_stand_for_any_choice(count: int, numel: int) -> None:
    words = torch.zeros(index_words(count, numel), dtype=torch.int32)
    assert torch.equal(unpack_indices(words, count, numel).long(), torch.arange(count))


@looped(("count", "numel"), [(3, 1000), (100, 1000), (500, 1000)])
def test_a_wrong_number_of_words_is_refused(count: int, numel: int) -> None:
    words = torch.ones(index_words(count, numel) + 1, dtype=torch.int32)
    with pytest.raises(WireError, match=f"take {words.numel() - 1} words, not {words.numel()}"):
        unpack_indices(words, count, numel)


@looped("indices", [[5, 70_000], [70_000, 5], [-1, 5]])
def test_indices_that_are_none_are_refused_instead_of_written_out_of_bounds(indices: list[int]) -> None:
    many = torch.cat([torch.arange(100), torch.tensor(indices)])
    with pytest.raises(ValueError, match="must ascend within 0 … 9999"):
        pack_indices(many, 10_000)


def test_words_at_any_offset_are_read() -> None:
    indices = chosen("uniform", 100, 1000, seed=1)
    packed = pack_indices(indices, 1000)
    buffer = torch.cat([torch.zeros(1, dtype=torch.int32), packed])
    assert torch.equal(unpack_indices(buffer[1:], 100, 1000).long(), indices)
