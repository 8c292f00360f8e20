"""Frames come back as `rounded` says, whatever is in them; the slow decoder reads the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.codec.gcomp import CodeTable, Key, frame, histogram, largest_frame, rounded, unframe
from gradwire.codec.gcomp.rounding import Dropped
from gradwire.kernels import slices
from tests.golden import slow
from tests.support.looped import looped
from tests.unit.codec.gcomp.inputs import (
    KEY,
    KINDS,
    SIZES,
    levels,
    normal,
    same_bits,
    special,
    there_and_back,
    thresholds,
)

by_kind = looped("kind", KINDS)


@by_kind
@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lossless_keeps_every_bit(kind: Callable[[int], Tensor], dtype: torch.dtype) -> None:
    for n in SIZES:
        x = kind(n).to(dtype)
        for table in (None, CodeTable.prior(dtype)):
            assert same_bits(there_and_back(x, 0, explicit=False, flush=False, table=table), x)


@by_kind
@looped("flush", [False, True])
def test_what_arrives_is_the_rounded_value(kind: Callable[[int], Tensor], flush: bool) -> None:
    for n in SIZES:
        x = kind(n)
        for dropped, explicit in (
            (1, False),
            (12, True),
            (23, False),
            (thresholds(n), False),
            (levels(n), True),
        ):
            out = there_and_back(x, dropped, explicit=explicit, flush=flush)
            assert same_bits(out, rounded(x, dropped, flush, explicit=explicit))


def cuts(n: int, dtype: torch.dtype) -> tuple[tuple[Dropped, bool], ...]:
    """What may be dropped of a 16-bit type, and whether it is levels that travel."""
    low, high = (90, 140) if dtype == torch.bfloat16 else (0, 35)
    return (2, False), (6, True), (levels(n).clamp(max=6), True), (thresholds(n, low, high), False)


@by_kind
@looped("dtype", [torch.bfloat16, torch.float16])
def test_of_short_types_too(kind: Callable[[int], Tensor], dtype: torch.dtype) -> None:
    for n in (*SIZES[:8], 2049, 65_537):
        x, flush = kind(n).to(dtype), dtype == torch.bfloat16
        for dropped, explicit in cuts(n, dtype):
            out = there_and_back(x, dropped, explicit=explicit, flush=flush)
            assert same_bits(out, rounded(x, dropped, flush, explicit=explicit))


@by_kind
def test_the_slow_decoder_reads_the_same(kind: Callable[[int], Tensor]) -> None:
    for n in (0, 1, 5, 17, 100, 2049):
        x = kind(n)
        for dropped, explicit, flush in (
            (0, False, False), (9, False, True), (thresholds(n), False, True), (levels(n), True, False)
        ):  # fmt: skip
            for table in (
                CodeTable.prior(),
                CodeTable.from_histogram(histogram(x, dropped, explicit=explicit, flush=flush)),
            ):
                data = frame(x, dropped, table, KEY, explicit=explicit, flush=flush)
                lengths = {table.id: table.lengths.tolist()}
                known = None if explicit else dropped.tolist() if isinstance(dropped, Tensor) else dropped
                found = slow.unframe(data.numpy().tobytes(), n, "torch.float32", known, lengths, KEY)
                words = rounded(x, dropped, flush, explicit=explicit).view(torch.int32).tolist()
                assert found == [word % 2**32 for word in words]


@looped("dtype", [torch.bfloat16, torch.float16])
def test_the_slow_decoder_reads_short_types(dtype: torch.dtype) -> None:
    x, table = special(500).to(dtype), CodeTable.prior(dtype)
    for dropped, explicit in ((0, False), *cuts(500, dtype)):
        data = frame(x, dropped, table, KEY, explicit=explicit, flush=False).numpy().tobytes()
        known = None if explicit else dropped.tolist() if isinstance(dropped, Tensor) else dropped
        found = slow.unframe(data, 500, str(dtype), known, {table.id: table.lengths.tolist()}, KEY)
        expected = rounded(x, dropped, False, explicit=explicit)
        assert found == [word % 2**16 for word in expected.view(torch.int16).tolist()]


def test_the_slow_decoder_reads_several_chunks() -> None:
    x, table = normal(65_536 + 9), CodeTable.prior()
    data = frame(x, 17, table, KEY, explicit=False, flush=True).numpy().tobytes()
    found = slow.unframe(data, x.numel(), "torch.float32", 17, {table.id: table.lengths.tolist()}, KEY)
    assert found == [word % 2**32 for word in rounded(x, 17, True).view(torch.int32).tolist()]


def test_adding_adds() -> None:
    for x in (normal(5000), normal(5000).bfloat16(), normal(5000).half()):
        table, out = CodeTable.prior(x.dtype), torch.ones_like(x)
        data = frame(x, 0, table, KEY, explicit=False, flush=False)
        unframe(data, out, 0, {table.id: table}, KEY, add=True)
        assert same_bits(out, torch.ones_like(x) + x)


@by_kind
def test_no_frame_is_larger_than_the_bound(kind: Callable[[int], Tensor]) -> None:
    # A table that fits nothing: everything is escaped, and would take more than it had.
    counts = torch.zeros(256, dtype=torch.int64)
    counts[1] = 10**9
    foreign = CodeTable.from_histogram(counts)
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            x = kind(n).to(dtype)
            data = frame(x, 0, foreign, KEY, explicit=False, flush=False)
            assert data.numel() <= largest_frame(n, dtype)
            assert same_bits(there_and_back(x, 0, explicit=False, flush=False, table=foreign), x)


def test_a_buffer_is_used_again() -> None:
    buffer, table = torch.empty(largest_frame(3000, torch.float32), dtype=torch.uint8), CodeTable.prior()
    for n in (3000, 10, 2999):
        data = frame(normal(n), 0, table, KEY, explicit=False, flush=False, buffer=buffer)
        assert data.data_ptr() == buffer.data_ptr()
        assert torch.equal(data, frame(normal(n), 0, table, KEY, explicit=False, flush=False))
    with pytest.raises(ValueError, match="aligned uint8"):
        frame(normal(3001), 0, table, KEY, explicit=False, flush=False, buffer=buffer)


@by_kind
def test_a_frame_counts_its_symbols_as_a_histogram_does(kind: Callable[[int], Tensor]) -> None:
    for n in (*SIZES[:10], 65_537):
        x = kind(n)
        for dropped, explicit, flush in (
            (0, False, False),
            (thresholds(n), False, True),
            (levels(n), True, True),
        ):
            data = frame(x, dropped, CodeTable.prior(), KEY, explicit=explicit, flush=flush)
            counts = torch.ones(256, dtype=torch.int64)
            counted = frame(x, dropped, CodeTable.prior(), KEY, explicit=explicit, flush=flush, counts=counts)
            assert torch.equal(counted, data)
            assert torch.equal(counts - 1, histogram(x, dropped, explicit=explicit, flush=flush))


def test_threads_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table = normal(1_000_003), CodeTable.prior()
    x[:300_000] = special(300_000)
    alone = frame(x, thresholds(x.numel()), table, KEY, explicit=False, flush=True)
    monkeypatch.setattr(slices, "free_threads", lambda: 3)
    monkeypatch.setattr(slices, "SMALLEST", 1000)
    limits, counts = thresholds(x.numel()), torch.zeros(256, dtype=torch.int64)
    assert torch.equal(frame(x, limits, table, KEY, explicit=False, flush=True, counts=counts), alone)
    assert torch.equal(counts, histogram(x, limits, flush=True))
    out = torch.ones_like(x)
    unframe(alone, out, thresholds(x.numel()), {table.id: table}, KEY)
    assert same_bits(out, rounded(x, thresholds(x.numel()), True))


def test_anywhere_in_memory() -> None:
    # A frame at an odd address, values and thresholds that are not contiguous.
    x, table, limits = normal(6000)[::2], CodeTable.prior(), thresholds(6000)[::2]
    data = frame(x, limits, table, KEY, explicit=False, flush=True)
    shifted = torch.empty(data.numel() + 1, dtype=torch.uint8)
    shifted[1:] = data
    out = torch.empty(6000)[::2]
    unframe(shifted[1:], out, limits, {table.id: table}, KEY)
    assert same_bits(out.contiguous(), rounded(x, limits, True))


@looped(
    ("dropped", "explicit", "flush", "dtype"),
    [
        (24, False, False, torch.float32),
        (-1, False, False, torch.float32),
        (7, True, False, torch.float32),
        (levels(4) + 1, True, False, torch.float32),
        (levels(5), True, False, torch.float32),
        (levels(4).int(), False, False, torch.float32),
        (8, False, False, torch.bfloat16),
        (11, False, False, torch.float16),
        (12, True, False, torch.float16),
        (0, False, True, torch.float16),
        (0, False, False, torch.float64),
    ],
)
def test_what_cannot_be_dropped_is_refused(dropped, explicit: bool, flush: bool, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"dropped|level|code|flush=False"):
        frame(torch.ones(4, dtype=dtype), dropped, CodeTable.prior(), KEY, explicit=explicit, flush=flush)


@looped("field", ["step", "unit", "hop", "state"])
def test_keys_have_their_bits(field: str) -> None:
    numbers = {"step": 0, "unit": 0, "hop": 0, "state": 0}
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match=field):
            Key(**{**numbers, field: wrong})
