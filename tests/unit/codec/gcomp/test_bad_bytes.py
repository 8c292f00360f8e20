"""Bytes that are not what they claim to be: `WireError`, and never more memory than the receiver expects."""

from __future__ import annotations

import struct
import tracemalloc
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.gcomp import CodeTable, Key, frame, histogram, unframe
from gradwire.errors import WireError
from tests.golden import slow
from tests.golden.fuzz import KEY, Case, cases, outcome, run, sealed
from tests.support.looped import looped
from tests.support.tiers import rest

RIGHT = CodeTable.prior()


def block(bytes_: int) -> Case:
    """The smallest frame of so many bytes or more."""
    x = torch.randn(bytes_, generator=torch.Generator().manual_seed(bytes_)) * 1e-3

    def of(numel: int) -> Tensor:
        return frame(x[:numel], 12, RIGHT, KEY, explicit=False, flush=True)

    numel = bisect_left(range(bytes_), bytes_, key=lambda numel: of(numel).numel())
    return Case(of(numel), torch.empty(numel), 12, RIGHT)


def test_every_truncation_of_4_kib_is_refused() -> None:
    case = block(4096)
    for length in range(case.data.numel()):
        assert outcome(case.data[:length], case) != "decoded"
        # Where the sender is in on it: a shorter length in the header, and a checksum that fits.
        if length >= 56 and length % 8 == 0:
            shorter = case.data[:length].clone()
            shorter.numpy()[40:48] = np.frombuffer(struct.pack("<Q", length), np.uint8)
            assert outcome(sealed(shorter), case) != "decoded"


def test_every_flipped_bit_of_512_bytes_is_noticed() -> None:
    case = block(512)
    for bit in range(8 * case.data.numel()):
        data = case.data.clone()
        data[bit // 8] ^= 1 << bit % 8
        assert outcome(data, case) != "decoded"


@pytest.mark.parametrize("every", rest([1, 7], but=[7]))
def test_flipped_bits_with_a_right_checksum_decode_as_the_slow_decoder_says(every: int) -> None:
    # A checksum is no protection against a sender: the checks behind it must hold by themselves. An odd
    # number, so that the raw frame has a filling.
    for case in cases(41):
        lengths = {case.table.id: case.table.lengths.tolist()}
        known = case.dropped.tolist() if isinstance(case.dropped, Tensor) else case.dropped
        outcomes = set()
        for bit in range(0, 8 * case.data.numel() - 64, every):
            data = case.data.clone()
            data[bit // 8] ^= 1 << bit % 8
            found = outcome(sealed(data), case)
            try:
                expected = slow.unframe(
                    data.numpy().tobytes(), case.out.numel(), str(case.out.dtype), known, lengths, KEY
                )
            except WireError:
                expected = None
            assert (found == "decoded") == (expected is not None), (bit, found)
            if expected is not None:
                assert case.out.view(torch.uint8).numpy().tobytes() == b"".join(
                    number.to_bytes(case.out.element_size(), "little") for number in expected
                )
            outcomes.add(found == "decoded")
        assert outcomes == {True, False}


def test_random_damage_ends_in_a_wire_error_or_in_numbers() -> None:
    # The full million: python -m tests.golden.fuzz
    found = run(10_000, seed=3)
    assert len(found) > 10
    assert sum(found.values()) == 10_000


@looped(
    "other",
    [Key(6, 2, 1, 77), Key(5, 3, 1, 77), Key(5, 2, 2, 77), Key(5, 2, 1, 78)],
)
def test_a_frame_of_another_place_is_refused(other: Key) -> None:
    for case in cases():
        with pytest.raises(WireError, match="belongs to"):
            unframe(case.data, case.out, case.dropped, {case.table.id: case.table}, other)


def test_a_frame_of_another_kind_is_refused() -> None:
    for case in cases():
        out, table = case.out, {case.table.id: case.table}
        with pytest.raises(WireError, match="expected were"):
            unframe(case.data, out.repeat(2), case.dropped, table, KEY)
        with pytest.raises(WireError, match=r"expected were|cannot have"):
            unframe(
                case.data, torch.empty(out.numel(), dtype=torch.float64).to(OTHER[out.dtype]), 0, table, KEY
            )
        with pytest.raises(WireError, match="not among those agreed"):
            unframe(case.data, out, case.dropped, {}, KEY)
        with pytest.raises(WireError, match="cannot have"):
            unframe(case.data, out, case.dropped, table, KEY, limit=case.data.numel() - 1)
        with pytest.raises(WireError, match="dropped"):
            unframe(case.data, out, None if case.dropped is not None else 0, table, KEY)
        with pytest.raises(WireError, match="flat uint8"):
            unframe(case.data.view(torch.int16), out, case.dropped, table, KEY)


OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def put(data: Tensor, at: int, layout: str, *values: int) -> None:
    packed = struct.pack("<" + layout, *values)
    data[at : at + len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def row(data: Tensor) -> int:
    """Where the only chunk's row of the directory is."""
    return data.numel() - 24


BOMBS: dict[str, Callable[[Tensor], None]] = {
    "2^63 elements": lambda data: put(data, 32, "Q", 1 << 63),
    "2^40 elements": lambda data: put(data, 32, "Q", 1 << 40),
    "-1 elements": lambda data: put(data, 32, "q", -1),
    "2^62 bytes": lambda data: put(data, 40, "Q", 1 << 62),
    "-8 bytes": lambda data: put(data, 40, "q", -8),
    "streams of 65535 words": lambda data: put(data, row(data), "4H", *[65_535] * 4),
    "streams of no word, fields of all": lambda data: put(data, row(data), "7H", 0, 0, 0, 0, 0, 0, 65_535),
    "65535 words of escapes": lambda data: put(data, row(data) + 8, "H", 65_535),
    "a raw chunk of 65535 words": lambda data: put(data, row(data), "8H", 0, 0, 0, 0, 0, 0, 65_535, 1),
    "an unknown kind of chunk": lambda data: put(data, row(data) + 14, "H", 65_535),
    "levels out of nothing": lambda data: put(data, row(data) + 10, "H", 2048),
    "ones all over": lambda data: put(data, 48, f"{data.numel() - 80}s", b"\xff" * (data.numel() - 80)),
}


@looped("name", BOMBS)
def test_bombs_do_not_go_off(name: str) -> None:
    case = block(65_536)
    unframe(case.data, case.out, 12, {RIGHT.id: RIGHT}, KEY)  # lookups are made once
    data = case.data.clone()
    BOMBS[name](data)
    sealed(data)
    tracemalloc.start()
    try:
        assert outcome(data, case) != "decoded"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Twice the unit. What is traced is numpy's and Python's memory; torch's own is at most a copy of a frame.
    assert peak < 2 * case.out.numel() * 4


def lengths_of(**changed: int) -> Tensor:
    lengths = torch.zeros(256, dtype=torch.uint8)
    lengths[0] = lengths[255] = 1
    for symbol, length in changed.items():
        lengths[int(symbol[1:])] = length
    return lengths[::2] | lengths[1::2] << 4


@looped(
    ("packed", "why"),
    [
        (lengths_of(s7=1), "oversubscribed"),
        (torch.full((128,), 0x11, dtype=torch.uint8), "oversubscribed"),
        (lengths_of(s255=2), "incomplete"),
        (lengths_of(s255=0), "two codes or more"),
        (lengths_of(s0=0, s7=1), "zero or of the escape"),
        (lengths_of(s255=0, s7=1), "zero or of the escape"),
        (torch.zeros(128, dtype=torch.uint8), "two codes or more"),
        (torch.full((128,), 0xFF, dtype=torch.uint8), "at most 12"),
        (torch.full((128,), 0xDD, dtype=torch.uint8), "at most 12"),
        (torch.zeros(0, dtype=torch.uint8), "128 bytes"),
        (torch.zeros(10**6, dtype=torch.uint8), "128 bytes"),
    ],
)
def test_tables_that_are_no_codes_are_refused(packed: Tensor, why: str) -> None:
    with pytest.raises(WireError, match=why):
        CodeTable(packed.numpy().tobytes())


def test_a_value_below_its_step_is_refused() -> None:
    # The thresholds of sender and receiver differ, and the state in the key does not say so.
    x = torch.full((50,), 1e-3)
    table, limits = CodeTable.from_histogram(histogram(x)), torch.full((50,), 120, dtype=torch.uint8)
    data = frame(x, limits, table, KEY, explicit=False, flush=True)
    with pytest.raises(WireError, match="does not decode"):
        unframe(data, torch.empty(50), limits + 60, {table.id: table}, KEY)
    with pytest.raises(WireError, match="does not decode"):
        unframe(data, torch.empty(50), limits - 5, {table.id: table}, KEY)


def test_padding_is_zero() -> None:
    # The fields end before the directory, and of 12 bits each a word is not filled by chance.
    case = block(512)
    data = case.data.clone()
    data[row(data) - 1] ^= 128
    with pytest.raises(WireError, match="does not decode"):
        unframe(sealed(data), case.out, 12, {RIGHT.id: RIGHT}, KEY)
