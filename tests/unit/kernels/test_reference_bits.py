"""Packing codes and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels.layouts import pack_codes, packed_bytes, unpack_codes


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 32), st.integers(0, 70), st.randoms(use_true_random=False))
def test_what_is_unpacked_is_what_was_packed(width: int, count: int, random) -> None:
    codes = torch.tensor([random.getrandbits(width) for _ in range(count)], dtype=torch.int64)
    packed = pack_codes(codes, width)
    assert packed.numel() == packed_bytes(count, width)
    assert torch.equal(unpack_codes(packed, width, count), codes)


def test_bits_lie_in_little_endian_order() -> None:
    assert pack_codes(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]), 1).tolist() == [1, 1]
    assert pack_codes(torch.tensor([0xABC, 0xDEF]), 12).tolist() == [0xBC, 0xFA, 0xDE]
