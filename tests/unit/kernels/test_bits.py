"""Bitmaps against their references, and there and back."""

import torch

from gradwire.kernels.places import pack_bits, scatter, unpack_bits
from tests.support.looped import looped


@looped("numel", [1, 31, 32, 33, 64, 1000, 4097])
@looped("ratio", [0.0, 0.03, 0.5, 1.0])
@looped("dtype", [torch.int32, torch.int64])
def test_bits_come_back_as_they_went(numel: int, ratio: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(numel)
    count, words = round(ratio * numel), -(-numel // 32)
    indices = torch.randperm(numel, generator=random)[:count].sort().values.to(dtype)
    packed = pack_bits(indices, words)
    assert torch.equal(packed, pack_bits.plain(indices, words))
    for unpack in (unpack_bits, unpack_bits.plain):
        found, as_many = unpack(packed, count)
        assert torch.equal(found, indices.int())
        assert as_many


@looped("count", [0, 1, 31, 32, 33, 63])
def test_more_ones_than_expected_are_reported_and_written_nowhere(count: int) -> None:
    packed = torch.full((2,), -1, dtype=torch.int32)
    for unpack in (unpack_bits, unpack_bits.plain):
        found, as_many = unpack(packed, count)
        assert found.tolist() == list(range(count))
        assert not as_many


@looped("words", [[5, 0], [0, 0]])
def test_for_ones_that_are_missing_the_last_place_stands(words: list[int]) -> None:
    packed, there = torch.tensor(words, dtype=torch.int32), [0, 2] if words[0] else []
    for unpack in (unpack_bits, unpack_bits.plain):
        found, as_many = unpack(packed, 4)
        assert found.tolist() == there + [63] * (4 - len(there))
        assert not as_many


@looped("value_type", [torch.float32, torch.float64])
def test_scatter_leaves_the_rest_alone(value_type: torch.dtype) -> None:
    out = torch.full((100,), 7.0, dtype=value_type)
    scatter(out, torch.tensor([3, 99]), torch.tensor([1.0, -2.0], dtype=value_type))
    expected = torch.full((100,), 7.0, dtype=value_type)
    expected[3], expected[99] = 1.0, -2.0
    assert torch.equal(out, expected)
