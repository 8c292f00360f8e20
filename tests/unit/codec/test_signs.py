"""Signs with one scale or two: parts, blocks and what is left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.codec.signs import one_bit, sign
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.whole import parts_of

F32, F64 = torch.float32, torch.float64
both = looped("make", [sign, one_bit])


def at_parts(*sizes: int) -> ExchangeContext:
    return ExchangeContext(step=0, unit=0, rank=0, world=1, parts=parts_of(*sizes))


def sent(codec: Codec, x: Tensor, ctx: ExchangeContext) -> Tensor:
    out = torch.zeros_like(x)
    codec.add_decoded(codec.encode(x, ctx), out, 1.0, ctx)
    return out


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


@both
@looped("block", [None, 8, 64])
def test_a_part_is_sent_as_if_it_were_alone(make, block) -> None:
    sizes, codec = (100, 0, 3, 64), make(block)
    x = normal(167)
    alone = [sent(codec, part, at_parts(part.numel())) for part in x.split(list(sizes))]
    assert torch.equal(sent(codec, x, at_parts(*sizes)), torch.cat(alone))


@both
@looped("bad", [torch.nan, torch.inf, -torch.inf])
def test_poison_stays_in_its_part_and_is_seen(make, bad: float) -> None:
    x = normal(30)
    x[15] = bad
    decoded = sent(make(), x, at_parts(10, 10, 10))
    assert decoded[:10].isfinite().all()
    assert decoded[20:].isfinite().all()
    assert not decoded[15].isfinite()


@looped("block", [None, 64])
def test_what_signs_leave_is_the_share_of_the_paper(block) -> None:
    # Lemma 8: ‖x‖² − ‖x‖₁²/d per block; both sides in float64, x - scale rounded once: 2^-23 of ‖x‖².
    x, ctx = normal(1000), at_parts(1000)
    left = (x - sent(sign(block), x, ctx)).double()
    blocks = x.double().split(block or 1000)
    expected = sum(b.square().sum() - b.abs().sum() ** 2 / b.numel() for b in blocks)
    assert left.square().sum().item() == pytest.approx(float(expected), rel=1e-6)


def test_normal_numbers_leave_a_third() -> None:
    # 1 − 2/π = 0.363; the share of a million draws deviates by less than a hundredth of it.
    x, ctx = normal(1_000_000), at_parts(1_000_000)
    left = x - sent(sign(), x, ctx)
    assert left.square().sum() / x.square().sum() == pytest.approx(1 - 2 / torch.pi, rel=0.01)


@looped("block", [None, 8])
def test_two_means_leave_no_more_than_one_and_less_where_sides_differ(block) -> None:
    x, ctx = normal(1000) + 1.0, at_parts(1000)
    one, two = (float((x - sent(codec, x, ctx)).square().sum()) for codec in (sign(block), one_bit(block)))
    assert two < 0.9 * one


def test_two_means_are_those_of_the_sides() -> None:
    x, ctx = torch.tensor([1.0, -2.0, 3.0, -6.0, 0.0, 4.0]), at_parts(4, 2)
    assert sent(one_bit(), x, ctx).tolist() == [2.0, -4.0, 2.0, -4.0, 2.0, 2.0]
    assert sent(sign(), x, ctx).tolist() == [3.0, -3.0, 3.0, -3.0, 2.0, 2.0]


@looped(
    ("codec", "dtype", "expected"),
    [
        (sign(), F32, 1000 // 8 + 4 + 3),
        (sign(), F64, 1000 // 8 + 8 + 3),
        (one_bit(), F32, 1000 // 8 + 8 + 3),
        (sign(8), F32, 125 * 5 + 3),
    ],
)
def test_payload_is_a_bit_per_element_and_the_levels(codec: Codec, dtype, expected: int) -> None:
    assert codec.payload(1000, dtype, at_parts(1000)) == (expected, torch.uint8)


@both
def test_blocks_of_part_of_a_byte_are_refused(make) -> None:
    with pytest.raises(ValueError, match="block=12 is not a multiple of 8"):
        make(12)


ROWS, COLUMNS, UNUSED = 8, 64, 3


def fed_back(codec: Codec, steps: int) -> tuple[Tensor, float]:
    """What an unused row of an embedding receives in sum, per step, and the largest magnitude ever sent."""
    ctx, random = at_parts(ROWS * COLUMNS), torch.Generator().manual_seed(0)
    memory, received, largest = torch.zeros(ROWS, COLUMNS), torch.zeros(steps, COLUMNS), 0.0
    for step in range(steps):
        gradient = torch.randn(ROWS, COLUMNS, generator=random)
        gradient[UNUSED] = 0.0
        x, out = (memory + gradient).reshape(-1), torch.zeros(ROWS * COLUMNS)
        codec.add_decoded(codec.take(x, ctx), out, 1.0, ctx)
        memory = x.view(ROWS, COLUMNS)
        received[step] = out.view(ROWS, COLUMNS)[UNUSED]
        largest = max(largest, float(out.abs().max()))
    return received.cumsum(0), largest


@both
def test_a_zero_row_receives_in_sum_at_most_one_scale(make) -> None:
    sums, largest = fed_back(make(), steps=50)
    # What waits for an element of no gradient is minus what it received. As it is sent with its sign, it
    # cannot leave [-s, s] for the largest scale s; 2u of that for each of 50 subtractions and of 50 sums.
    assert sums.abs().max() <= largest * (1 + 100 * torch.finfo(F32).eps)
    assert sums[0].abs().min() > 0, "an element of no gradient is sent as a sign, too"


@both
def test_a_zero_row_receives_nothing_in_blocks_of_rows(make) -> None:
    sums, _ = fed_back(make(COLUMNS), steps=50)
    assert not sums.any()
