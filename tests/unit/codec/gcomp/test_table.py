"""Codes: the best under the limit, complete, the same on all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gradwire.codec.gcomp import (
    N_THETA,
    SYMBOLS,
    CodeTable,
    canonical_codes,
    code_lengths,
    decode_symbols,
    encode_symbols,
    fingerprint,
    histogram,
    package_merge,
)
from gradwire.kernels.frames import checksum
from gradwire.kernels.huffman import ESCAPE, Lookups, count_symbols
from tests.golden import slow
from tests.support.looped import looped
from tests.unit.codec.gcomp.inputs import any_bits, normal


def drawn(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).zipf(1.4, n).clip(1, 10**6).astype(np.int64)


@looped("n", [2, 3, 4, 5, 6])
def test_no_code_is_shorter(n: int) -> None:
    # All complete choices of lengths, tried one by one.
    for longest in range((n - 1).bit_length(), 6):
        for seed in range(5):
            weights = drawn(n, seed)
            lengths = package_merge(weights, longest)
            every = itertools.product(range(1, longest + 1), repeat=n)
            best = min(int(np.dot(weights, some)) for some in every if sum(2.0**-b for b in some) <= 1)
            assert int(np.dot(weights, lengths.astype(int))) == best
            assert sum(2.0 ** -lengths.astype(float)) == 1


def huffman_bits(weights: list[int]) -> int:
    """Of all symbols together, by Huffman's code without a limit."""
    heap, bits = sorted(weights), 0
    while len(heap) > 1:
        pair = heap[0] + heap[1]
        bits += pair
        heap = sorted([*heap[2:], pair])
    return bits


def test_without_a_limit_it_is_huffman() -> None:
    for seed in range(20):
        weights = drawn(30, seed)
        found = int(np.dot(weights, package_merge(weights, 29).astype(int)))
        assert found == huffman_bits(weights.tolist())


def test_the_escape_weighs_as_much_as_all_that_it_stands_for() -> None:
    counts = np.zeros(SYMBOLS, np.int64)
    frequent, rare = range(118, 126), range(130, 230)
    counts[frequent] = 40_000 >> np.arange(8)
    counts[rare] = 3
    counts[[0, ESCAPE]] = 5_000, 20
    assert not code_lengths(counts)[rare].any()
    tail = 3 * len(rare) + 20
    best = huffman_bits([*counts[frequent].tolist(), 5_000, tail]) + 8 * tail
    histogram = torch.from_numpy(counts)
    assert CodeTable.from_histogram(histogram).bits(histogram) == best


@looped(("n", "longest"), [(1, 4), (17, 4)])
def test_impossible_limits_are_refused(n: int, longest: int) -> None:
    with pytest.raises(ValueError, match="no prefix code"):
        package_merge(np.ones(n, np.int64), longest)


@looped("longest", [8, 9, 10, 11, 12])
def test_lengths_are_complete_whatever_is_counted(longest: int) -> None:
    for seed in range(10):
        random = np.random.default_rng(seed)
        counts = np.where(
            random.random(SYMBOLS) < random.random(), random.zipf(1.2, SYMBOLS).clip(0, 10**9), 0
        )
        lengths = code_lengths(counts.astype(np.int64), longest)
        assert lengths.max() <= longest
        assert sum(2.0 ** -lengths[lengths > 0].astype(float)) == 1
        assert lengths[0]
        assert lengths[ESCAPE]


def test_what_is_escaped_is_rare_and_would_cost_more() -> None:
    counts = histogram(torch.cat([normal(200_000), any_bits(200)])).numpy()
    chosen = code_lengths(counts)
    cost = CodeTable.from_histogram(torch.from_numpy(counts)).bits(torch.from_numpy(counts))
    for symbol in np.flatnonzero((counts > 0) & (chosen > 0)):
        # Escaping one more symbol never helps by more than the bits of a byte per thousand.
        other = counts.copy()
        other[ESCAPE] += other[symbol]
        other[symbol] = 0
        if symbol not in (0, ESCAPE):
            assert (
                CodeTable.from_histogram(torch.from_numpy(other)).bits(torch.from_numpy(counts))
                > 0.999 * cost
            )


def test_size_is_near_the_entropy() -> None:
    # A normal's exponents: 2.5455 bits, of which Huffman's whole bits lose 0.04.
    counts = histogram(normal(1_000_000))
    shares = counts[counts > 0].double() / counts.sum()
    entropy = float(-(shares * shares.log2()).sum())
    assert 1.0 < CodeTable.from_histogram(counts).bits(counts) / 1_000_000 / entropy < 1.02


def test_a_table_is_its_bytes() -> None:
    for table in (
        CodeTable.prior(),
        CodeTable.prior(torch.float16),
        CodeTable.from_histogram(histogram(normal(1000))),
    ):
        packed = table.to_tensor()
        assert packed.shape == (128,)
        assert packed.dtype == torch.uint8
        again = CodeTable(packed.numpy().tobytes())
        assert again == table
        assert again.id == table.id == fingerprint(packed) < 2**32
        assert torch.equal(torch.from_numpy(again.lengths), torch.from_numpy(table.lengths))
    assert len({CodeTable.prior().id, CodeTable.prior(torch.float16).id}) == 2


def test_the_prior_knows_no_scale() -> None:
    # Gradients from 2^-16 to 2^-4: at most 6 bits of 8. A uniform code over those alone would take 4.6.
    for exponent in range(-16, -3):
        counts = histogram(normal(10_000) * 1e3 * 2.0**exponent)
        assert CodeTable.prior().bits(counts) < 6 * 10_000


@looped("wrong", [torch.zeros(257, dtype=torch.int64), torch.full((256,), -1)])
def test_histograms_have_a_length(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="256 counts"):
        CodeTable.from_histogram(wrong)


def test_codes_are_the_slow_decoder_s() -> None:
    for table in (CodeTable.prior(), CodeTable.from_histogram(histogram(any_bits(5000)))):
        codes = canonical_codes(table.lengths)
        for (length, code), symbol in slow.codes(table.lengths.tolist()).items():
            assert format(codes[symbol], f"0{length}b")[::-1] == format(code, f"0{length}b")


@looped("longest", [9, N_THETA])
@looped("count", [0, 1, 3, 4, 15, 16, 17, 63, 64, 200, 4096, 4099, 100_003])
def test_streams_come_back(count: int, longest: int) -> None:
    random = np.random.default_rng(count)
    for shape in (1.1, 1.5, 4.0):
        symbols = torch.from_numpy(random.zipf(shape, count).clip(0, 254).astype(np.uint8))
        lookups = Lookups(code_lengths(count_symbols(symbols).numpy(), longest))
        words, sizes = encode_symbols(symbols, lookups)
        expected = torch.where(torch.from_numpy(lookups.escaped)[symbols.long()], ESCAPE, symbols)
        found = decode_symbols(words, sizes, count, lookups)
        assert found is not None
        assert torch.equal(found, expected.to(torch.uint8))
        assert sum(sizes) == words.numel()


def test_streams_of_another_length_are_refused() -> None:
    symbols = torch.from_numpy(np.random.default_rng(0).zipf(1.5, 5000).clip(0, 254).astype(np.uint8))
    lookups = Lookups(code_lengths(count_symbols(symbols).numpy()))
    words, sizes = encode_symbols(symbols, lookups)
    assert decode_symbols(words, sizes, 5400, lookups) is None
    assert decode_symbols(words, sizes, 4600, lookups) is None
    assert decode_symbols(words[:-1], sizes, 5000, lookups) is None
    assert decode_symbols(words, (sizes[0] + 1, sizes[1] - 1, *sizes[2:]), 5000, lookups) is None
    assert decode_symbols(words, (-1, sizes[1] + 1, *sizes[2:]), 5000, lookups) is None


def test_checksums_are_xxh64() -> None:
    # From the specification's own list, and beside the slow one at every length of whole words.
    for text, expected in (
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
    ):
        data = torch.tensor(list(text), dtype=torch.uint8)
        assert checksum(data) == expected
    data = torch.arange(200, dtype=torch.uint8)
    for words in range(20):
        assert checksum(data[: 8 * words]) == slow.checksum(bytes(range(8 * words)))
        assert checksum(data[3 : 8 * words + 3]) == slow.checksum(bytes(range(3, 8 * words + 3)))
    assert len({checksum(data[:n]) for n in range(200)}) == 200
