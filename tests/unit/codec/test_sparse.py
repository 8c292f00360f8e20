"""Values alone, and values with indices: the bytes, and what comes out again."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse, values
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped

AT = ExchangeContext(step=4, unit=1, rank=0, world=3)


@looped(
    ("dtype", "ratio", "size"),
    [
        (torch.float32, 0.02, 8 + 2 * 4),
        (torch.float32, 0.03, 16 + 3 * 4),  # three indices fill 12 bytes, padded to 16
        (torch.float64, 0.03, 16 + 3 * 8),
        (torch.float16, 0.03, 16 + 8),  # three values fill 6 bytes, padded to 8
        (torch.bfloat16, 0.02, 8 + 4),
    ],
)
def test_layout_of_few(dtype: torch.dtype, ratio: float, size: int) -> None:
    x = torch.zeros(100, dtype=dtype)
    x[[2, 4, 8]] = torch.tensor([7, -9, 8], dtype=dtype)
    codec = sparse(top_k(ratio))
    payload = codec.encode(x, AT)
    count = round(100 * ratio)
    kept = [2, 4, 8] if count == 3 else [4, 8]
    start = -(-4 * count // 8) * 8
    assert codec.payload(100, dtype, AT) == (size, torch.uint8)
    assert payload.shape == (size,)
    assert payload[: 4 * count].view(torch.int32).tolist() == kept
    assert payload[start : start + count * dtype.itemsize].view(dtype).tolist() == x[kept].tolist()


def test_layout_of_many_is_a_bitmap_and_the_values() -> None:
    x = torch.zeros(40)
    x[[0, 5, 33]] = torch.tensor([7.0, -9.0, 8.0])
    codec = sparse(top_k(3 / 40))
    payload = codec.encode(x, AT)
    assert codec.payload(40, torch.float32, AT) == (8 + 3 * 4, torch.uint8)
    assert payload[:8].view(torch.int32).tolist() == [1 + 2**5, 2]
    assert payload[8:].view(torch.float32).tolist() == [7.0, -9.0, 8.0]


def test_padding_is_zero_so_that_equal_tensors_have_equal_bytes() -> None:
    payload = sparse(top_k(0.03)).encode(torch.arange(100.0).half(), AT)
    assert payload[12:16].tolist() == [0] * 4
    assert payload[22:].tolist() == [0] * 2


@looped("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@looped("numel", [0, 1, 30, 50])
def test_every_row_of_a_gathered_buffer_decodes(dtype: torch.dtype, numel: int) -> None:
    # A row starts where the one before ends: a view as int32 needs that to be a multiple of 4.
    codec, x = sparse(top_k(0.1)), torch.arange(numel).to(dtype)
    payload = codec.encode(x, AT)
    rows = torch.stack([payload] * 3)
    for row in rows:
        out = torch.zeros_like(x)
        codec.add_decoded(row, out, 1.0, AT)
        assert torch.equal(out, torch.where(x >= numel - codec.selector.count(numel, AT), x, 0))


def test_values_alone_need_a_selector_that_chooses_alike_everywhere() -> None:
    with pytest.raises(ValueError, match="differs between ranks"):
        values(top_k(0.1))
