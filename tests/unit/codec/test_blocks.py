"""Blocks as a codec: payloads, parts, and what is refused. The arithmetic is tested with the kernels."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.blocks import blocks
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.whole import parts_of

AT = ExchangeContext(step=0, unit=0, rank=0, world=1)


@looped(
    ("kind", "block", "sizes", "payload"),
    [
        ("int8", 256, (), 4 + 100),
        ("int8", 64, (50, 50), 2 * 4 + 100),
        ("int4", 64, (51, 49), 2 * 4 + 26 + 25 + 1),
        ("int4", 33, (66, 34), 4 * 4 + 2 * 17 + 17 + 1),
        ("fp8", 1000, (99, 1), 2 * 4 + 100),
    ],
)
def test_payloads_are_scales_and_codes_filled_up(
    kind: str, block: int, sizes: tuple[int, ...], payload: int
) -> None:
    ctx = ExchangeContext(0, 0, 0, 1, parts=parts_of(*sizes))
    codec = blocks(kind, block)  # type: ignore[arg-type]
    size = payload + -payload % 4
    for dtype in (torch.float32, torch.float16):
        assert codec.payload(100, dtype, ctx) == (size, torch.uint8)
    assert codec.encode(torch.ones(100), ctx).numel() == size


def test_scales_of_float64_are_float64() -> None:
    assert blocks("int8").payload(100, torch.float64, AT) == (8 + 104, torch.uint8)
    x, out = torch.tensor([1e300, 1e-300], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    blocks("int8").add_decoded(blocks("int8").encode(x, AT), out, 1.0, AT)
    assert out.tolist() == [pytest.approx(1e300), 0.0]


def test_a_row_of_a_gathered_buffer_can_be_read() -> None:
    codec, out = blocks("int4", 3), torch.zeros(5)
    payload = codec.encode(torch.tensor([7.0, -3.0, 2.0, 0.0, 14.0]), AT)
    for row in torch.stack([payload] * 3):
        codec.add_decoded(row, out, 1.0, AT)
    assert out.tolist() == [21.0, -9.0, 6.0, 0.0, 42.0]


@looped(
    ("kind", "block", "message"),
    [("int2", 256, "none of int8, int4, fp8"), ("int8", 0, "at least 1 element")],
)
def test_nonsense_is_refused(kind: str, block: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks(kind, block)  # type: ignore[arg-type]
