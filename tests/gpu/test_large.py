"""Kernels for devices beyond 2³¹ elements, where an index of 32 bits would wrap around."""

from __future__ import annotations

import pytest
import torch

from gradwire.kernels.blocks import encode_blocks
from gradwire.kernels.layouts import ScaledBlocks
from tests.support.twins import Twins
from tests.support.where import WHERE

pytestmark = pytest.mark.skipif(
    WHERE.type != "cuda" or torch.cuda.mem_get_info()[0] < 40 * 2**30, reason="needs a GPU with 40 GiB free"
)
device = Twins("device")
NUMEL = 2**31 + 4099
ENDS = (slice(0, 5000), slice(2**31 - 5000, 2**31 + 4099))


def ramp() -> torch.Tensor:
    """Element i is i modulo a prime."""
    x = torch.arange(NUMEL, dtype=torch.int64, device=WHERE).remainder_(8191).float()
    torch.cuda.empty_cache()
    return x


def test_compensation_reaches_the_last_element() -> None:
    x = ramp()
    seen = device.compensate(x, None, x, 1.0, 0.5)
    assert seen.read() == ((), True)
    for end in ENDS:
        at = torch.arange(end.start, end.stop, dtype=torch.int64, device=WHERE)
        assert torch.equal(x[end], at.remainder(8191).float() * 0.5)


def test_blocks_reach_the_last_element() -> None:
    x, blocks = ramp(), ScaledBlocks((NUMEL,), 4096, "int8")
    scales = torch.empty(blocks.count, device=WHERE)
    codes = torch.empty(blocks.code_bytes, dtype=torch.uint8, device=WHERE)
    if device.encode_blocks(x, blocks, scales, codes, False) is NotImplemented:
        pytest.skip("such a unit is declined, and the reference computes")
    for end in ENDS:
        # As many whole blocks on the CPU, by the reference.
        start, stop = -(-end.start // 4096) * 4096, end.stop // 4096 * 4096
        part = ScaledBlocks((stop - start,), 4096, "int8")
        expected = torch.empty(part.count), torch.empty(part.code_bytes, dtype=torch.uint8)

        encode_blocks.plain(x[start:stop].cpu(), part, *expected, False)
        assert torch.equal(scales[start // 4096 : stop // 4096].cpu(), expected[0])
        assert torch.equal(codes[start:stop].cpu(), expected[1])
