"""A plugin for pytest that makes one kernel wrong by one bit, to show that its test would notice."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from torch import Tensor


@pytest.fixture(autouse=True)
def _one_bit_is_wrong() -> Iterator[None]:
    from gradwire.kernels.device import chunks as device

    sound = device.chunk_topk_indices

    def wrong(x: Tensor, chunks: int, keep: int) -> object:
        found = sound(x, chunks, keep)
        if isinstance(found, Tensor) and found.numel():
            found[0] ^= 1
        return found

    with patch.object(device, "chunk_topk_indices", wrong):
        yield
