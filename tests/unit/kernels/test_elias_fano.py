"""The planes: kernels against references, on packed planes and on arbitrary bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels.chosen import pack_elias_fano, unpack_elias_fano
from gradwire.kernels.payload import COUNTS, DECODING, ENCODING, GROUPS, ORDER, ZEROS_BEFORE, Planes
from tests.support.looped import looped
from tests.support.tiers import rest

SIZES = ((0, 0), (0, 50), (1, 1), (1, 2), (2, 1000), (31, 64), (32, 33), (33, 5000), (64, 64), (5000, 70_001))


def drawn(count: int, numel: int, seed: int) -> Tensor:
    return torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count].sort().values


Found = tuple[Tensor, bool | Tensor]


def same(one: Found, other: Found) -> bool:
    return torch.equal(one[0].long(), other[0].long()) and bool(one[1]) == bool(other[1])


@looped("low_bits", [0, 1, 2, 5, 9, 31, 32])
@looped(("count", "numel"), SIZES)
@looped("dtype", [torch.int32, torch.int64])
def test_kernels_and_references_agree(count: int, numel: int, low_bits: int, dtype: torch.dtype) -> None:
    planes = Planes(count, numel, low_bits)
    for indices in (drawn(count, numel, low_bits), torch.arange(count), torch.arange(numel - count, numel)):
        packed = pack_elias_fano(indices.to(dtype), planes)
        assert packed.shape == (planes.words,)
        assert torch.equal(packed, pack_elias_fano.plain(indices, planes))
        found = unpack_elias_fano(packed, planes)
        assert found[0].dtype == torch.int32
        assert same(found, (indices, True))
        assert same(found, unpack_elias_fano.plain(packed, planes))


@pytest.mark.rest
@looped("pattern", ["uniform", "run", "every other"])
def test_planes_end_anywhere_in_a_word(pattern: str) -> None:
    # A block whose place lies across two words may be the last one: about one size in 30 shows it.
    for count in range(1, 600):
        numel = 2 * count + 7
        indices = {
            "uniform": drawn(count, numel, seed=count),
            "run": torch.arange(count) + 7,
            "every other": 2 * torch.arange(count),
        }[pattern]
        for low_bits in (0, 1):
            planes = Planes(count, numel, low_bits)
            packed = pack_elias_fano(indices, planes)
            assert torch.equal(packed, pack_elias_fano.plain(indices, planes))
            assert same(unpack_elias_fano(packed, planes), (indices, True))


@looped("numel", [2**31, 2**31 + 1, 2**45])
def test_large_indices(numel: int) -> None:
    planes = Planes(4, numel, 30)
    indices = torch.tensor([0, 5, numel // 2, numel - 1])
    packed = pack_elias_fano(indices, planes)
    assert torch.equal(packed, pack_elias_fano.plain(indices, planes))
    found = unpack_elias_fano(packed, planes)
    assert found[0].dtype == (torch.int32 if numel == 2**31 else torch.int64)
    assert same(found, (indices, True))
    assert same(found, unpack_elias_fano.plain(packed, planes))


def mutations(packed: Tensor, random: torch.Generator) -> Tensor:
    """The words with some bits flipped, with some words replaced, or all of them at random."""
    noise = torch.randint(-(2**31), 2**31, packed.shape, generator=random).to(torch.int32)
    kind = int(torch.randint(3, (1,), generator=random))
    if kind == 0:
        bits = torch.randint(0, 32 * packed.numel(), (1 + int(noise[0]) % 3,), generator=random)
        packed = packed.clone()
        for bit in bits.tolist():
            packed[bit // 32] ^= torch.tensor(1 << bit % 32).to(torch.int32)
        return packed
    if kind == 1:
        return torch.where(torch.rand(packed.shape, generator=random) < 0.3, noise, packed)
    return noise


@looped(
    ("count", "numel", "low_bits"),
    [
        (1, 2, 0),
        (1, 2**31, 29),
        (3, 2**31, 28),
        (3, 40, 2),
        (10, 60, 1),
        (33, 100, 0),
        (40, 900, 4),
        (4, 2**40, 32),
    ],
)
@pytest.mark.parametrize("trials", rest([250, 2500], but=[250]))
def test_damaged_words_give_what_the_reference_makes_of_them(
    count: int, numel: int, low_bits: int, trials: int
) -> None:
    # Damaged payloads that still mean something are found by both or by neither.
    planes, random = Planes(count, numel, low_bits), torch.Generator().manual_seed(count)
    outcomes = set()
    for trial in range(trials):
        step = numel // count
        packed = pack_elias_fano(torch.arange(count) * step + trial % step, planes)
        damaged = mutations(packed, random)
        found, sound = unpack_elias_fano(damaged, planes)
        assert same((found, sound), unpack_elias_fano.plain(damaged, planes))
        outcomes.add(sound)
        # Also where they mean nothing, so that what is done with them stays within bounds.
        assert found.shape == (count,)
        assert (found.diff() > 0).all()
        assert 0 <= int(found[0]) <= int(found[-1]) < numel
    assert outcomes == {True, False}


@looped("ones", [0, 19, 21, 600])
def test_a_wrong_number_of_ones_is_noticed(ones: int) -> None:
    planes = Planes(20, 1000, 0)
    other = Planes(ones, 1000, 0)
    packed = pack_elias_fano(drawn(ones, 1000, seed=1), other)
    groups = packed[other.starts[1] : other.starts[2]]
    places = torch.cat([packed[other.starts[2] :], torch.zeros(1, dtype=torch.int32)])[:1]
    words = torch.cat([groups, places])
    # Zeros alone are accepted: an encoder that has failed sends them.
    assert same(unpack_elias_fano(words, planes), (torch.arange(20), ones == 0))
    assert same(unpack_elias_fano.plain(words, planes), (torch.arange(20), ones == 0))


def test_low_bits_that_descend_are_noticed() -> None:
    # Low bits 1 and 3 below the same upper part, which swapped would make 3 and 2.
    planes = Planes(2, 32, 3)
    packed = pack_elias_fano(torch.tensor([1, 4]), planes)
    assert packed[0] == 1 | 3 << 3
    packed[0] = 3 | 1 << 3
    assert same(unpack_elias_fano(packed, planes), (torch.arange(2), False))
    assert same(unpack_elias_fano.plain(packed, planes), (torch.arange(2), False))


def test_a_layout_of_another_size_is_refused() -> None:
    planes = Planes(10, 1000, 3)
    with pytest.raises(ValueError, match="9 indices do not fit a layout for 10"):
        pack_elias_fano(torch.arange(9), planes)
    with pytest.raises(ValueError, match=f"3 words do not fit a layout of {planes.words}"):
        unpack_elias_fano(torch.zeros(3, dtype=torch.int32), planes)


def test_every_pattern_has_one_code_of_at_most_6_bits_and_one_for_each_of_its_ones() -> None:
    codes = set()
    for pattern in range(1024):
        group, width, place = (
            int(ENCODING[pattern]) >> shift & mask for shift, mask in ((0, 63), (6, 7), (9, 127))
        )
        codes.add((group, place))
        assert group < len(GROUPS)
        assert width <= pattern.bit_count()
        assert place < 1 << width
        first = int(DECODING[group])
        assert first >> 11 == width
        assert ORDER[(first & 2047) + place] == pattern
    assert len(codes) == 1024


def test_tables_of_ones_say_how_many_and_where() -> None:
    for position, pattern in enumerate(ORDER):
        ones = [bit for bit in range(10) if pattern >> bit & 1]
        assert COUNTS[position] == len(ones)
        zeros = [pattern_zeros(pattern, bit) for bit in ones]
        assert ZEROS_BEFORE[position, : len(ones)].tolist() == zeros


def pattern_zeros(pattern: int, end: int) -> int:
    return sum(not pattern >> bit & 1 for bit in range(end))
