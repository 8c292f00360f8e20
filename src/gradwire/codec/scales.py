"""Payload layout of scales and codes in one byte buffer.

It has a file of its own because `attach` compiles the kernels that a codec's module imports. QSGD's and
TernGrad's payloads have this layout, and need none of the kernels of `gradwire.codec.blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScaledPayload:
    """Layout of a payload: `count` scales of `dtype`, then `code_bytes` bytes, then zeros up to a whole
    scale.

    The padding aligns the scales of every row if several payloads are the rows of one buffer.

    >>> ScaledPayload(count=4, code_bytes=502, dtype=torch.float32).bytes
    520
    """

    count: int
    code_bytes: int
    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        return -(-self._stop // self.dtype.itemsize) * self.dtype.itemsize

    @cached_property
    def _start(self) -> int:
        return self.count * self.dtype.itemsize

    @cached_property
    def _stop(self) -> int:
        return self._start + self.code_bytes

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a payload (bytes,) uint8, of which only the padding is written."""
        payload = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        payload[self._stop :] = 0
        return payload

    def split(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the scales and the codes of a payload."""
        return payload[: self._start].view(self.dtype), payload[self._start : self._stop]
