"""Two bits as a codec: payloads, rows of a gathered buffer, and how much is left at worst."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.levels import four_levels
from gradwire.unit.context import ExchangeContext
from tests.laws.cases import left_by_halves
from tests.support.looped import looped
from tests.support.whole import parts_of

AT = ExchangeContext(step=0, unit=0, rank=0, world=1)


@looped(
    ("block", "sizes", "payload"),
    [(64, (), 2 * 8 + 25 + 3), (64, (51, 49), 2 * 8 + 13 + 13 + 2), (32, (66, 34), 5 * 8 + 17 + 9 + 2)],
)
def test_payloads_are_levels_and_codes_filled_up(block: int, sizes: tuple[int, ...], payload: int) -> None:
    ctx, codec = ExchangeContext(0, 0, 0, 1, parts=parts_of(*sizes)), four_levels(block)
    for dtype in (torch.float32, torch.float16):
        assert codec.payload(100, dtype, ctx) == (payload, torch.uint8)
    assert codec.payload(100, torch.float64, ctx)[0] > payload
    assert codec.encode(torch.ones(100), ctx).numel() == payload


def test_a_row_of_a_gathered_buffer_can_be_read_and_zeros_say_nothing() -> None:
    codec, out = four_levels(8), torch.zeros(5)
    payload = codec.encode(torch.tensor([7.0, -3.0, 3.0, -7.0, 7.0]), AT)
    for row in torch.stack([payload, torch.zeros_like(payload), payload]):
        codec.add_decoded(row, out, 1.0, AT)
    assert out.tolist() == [14.0, -6.0, 6.0, -14.0, 14.0]


@looped(
    ("rest", "middle", "share"),
    [(0.0, 62, 62 / 66), (1e-9, 12, left_by_halves(64))],
)
def test_the_bound_is_met_by_the_worst_of_blocks(rest: float, middle: int, share: float) -> None:
    x = torch.full((64,), rest)
    x[:1], x[1 : 1 + middle] = 1.0, 0.5
    left = x.clone()
    four_levels(64).take(left, AT)
    assert float((left**2).sum() / (x**2).sum()) == pytest.approx(share, rel=1e-6)


def test_bounds_are_those_that_the_docstring_states() -> None:
    assert [round(left_by_halves(count), 2) for count in (4, 16, 64)] == [0.17, 0.37, 0.61]


def test_blocks_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        four_levels(12)
