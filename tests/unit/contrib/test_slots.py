"""Buffers of words and values: layout, round trips, and what is refused."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.sparse import SparseLayout
from gradwire.contrib.oktopk import Slots
from gradwire.errors import WireError
from gradwire.kernels.payload import Buffer
from tests.support.looped import looped

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@looped(
    ("words", "count", "dtype", "size"),
    [
        (0, 0, torch.float32, 0),
        (1, 1, torch.float32, 8 + 4),
        (3, 3, torch.float16, 16 + 8),
        (2, 2, torch.bfloat16, 8 + 4),
        (3, 1, torch.float64, 16 + 8),
    ],
)
def test_words_are_padded_to_8_bytes_and_values_to_4(words, count, dtype, size) -> None:
    buffer = Buffer(words, count, dtype)
    assert buffer.bytes == size
    first, second = buffer.parts(torch.zeros(size, dtype=torch.uint8))
    assert (first.shape, first.dtype) == ((words,), torch.int32)
    assert (second.shape, second.dtype) == ((count,), dtype)


def test_parts_are_views_that_do_not_overlap() -> None:
    buffer = Buffer(3, 2, torch.float32)
    payload = torch.zeros(buffer.bytes, dtype=torch.uint8)
    words, values = buffer.parts(payload)
    words.fill_(-1)
    assert not values.any()
    values.fill_(1.0)
    assert payload[:12].eq(255).all()
    assert payload[12:16].eq(0).all()


@every_dtype
@pytest.mark.parametrize(("count", "numel"), [(1, 1), (3, 1000), (300, 1000), (1000, 1000)])
def test_chosen_elements_come_back(dtype: torch.dtype, count: int, numel: int) -> None:
    chosen = SparseLayout(count, numel, dtype)
    places = torch.randperm(numel, generator=torch.Generator().manual_seed(count))[:count].sort().values
    values = (torch.arange(count) % 100).to(dtype)
    payload = chosen.write(places, values)
    assert payload.shape == (chosen.shape.bytes,)
    found, told = chosen.read(payload)
    assert torch.equal(found.long(), places)
    assert torch.equal(told, values)


@every_dtype
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_slots_come_back_from_every_row_of_a_buffer(dtype: torch.dtype, count: int) -> None:
    slots = Slots(3, dtype)
    rows = torch.zeros(4, slots.bytes, dtype=torch.uint8)
    for number, row in enumerate(rows):
        slots.write(row, torch.arange(count) + 10 * number, torch.full((count,), number + 1, dtype=dtype))
    for number, row in enumerate(rows):
        places, values = slots.read(row, 10 * number, 10 * number + 3)
        assert places.tolist() == [10 * number + i for i in range(count)]
        assert values.tolist() == [number + 1] * count


def test_zeros_are_empty_slots_of_any_region() -> None:
    slots = Slots(2, torch.float32)
    places, values = slots.read(torch.zeros(slots.bytes, dtype=torch.uint8), 7, 7)
    assert places.numel() == values.numel() == 0


@looped(
    ("words", "complaint"),
    [
        ([3, 5, 6], "3 values where 2 fit"),
        ([-1, 5, 6], "-1 values where 2 fit"),
        ([2, 5, 10], "outside 5 … 9"),
        ([2, 4, 9], "outside 5 … 9"),
        ([1, 5, 10], None),  # the second slot is empty, whatever it holds
    ],
)
def test_what_no_peer_writes_is_refused(words: list[int], complaint: str | None) -> None:
    slots = Slots(2, torch.float32)
    payload = torch.zeros(slots.bytes, dtype=torch.uint8)
    payload[:12].view(torch.int32).copy_(torch.tensor(words))
    if complaint is None:
        assert slots.read(payload, 5, 10)[0].tolist() == [5]
    else:
        with pytest.raises(WireError, match=complaint):
            slots.read(payload, 5, 10)
