"""int32 words and values in one byte buffer, so that both travel in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gradwire.codec import indices as places


@dataclass(frozen=True)
class Buffer:
    """`words` int32 words, padded to a multiple of 8 bytes, then `count` values of `dtype`, padded to 4.

    The padding aligns the values, and the words of every row where several buffers are the rows of one.

    >>> Buffer(words=3, count=3, dtype=torch.float16).bytes
    24
    """

    words: int
    count: int
    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        """Size, a multiple of 4."""
        return self._start + _padded(self.count * self.dtype.itemsize, 4)

    @cached_property
    def _start(self) -> int:
        return _padded(4 * self.words, 8)

    def parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Words (words,) int32 and values (count,) of a payload (bytes,) uint8, both as views.

        An empty payload must own its memory: as a row of an empty buffer it has an offset that no view
        allows.
        """
        stop = self._start + self.count * self.dtype.itemsize
        return payload[: 4 * self.words].view(torch.int32), payload[self._start : stop].view(self.dtype)


@dataclass(frozen=True)
class Chosen:
    """`count` of `numel` elements: places as `gradwire.codec.indices` packs them, and values.

    >>> chosen = Chosen(count=2, numel=1000, dtype=torch.float32)
    >>> payload = chosen.write(torch.tensor([3, 30]), torch.tensor([1.0, 2.0]))
    >>> payload.numel(), chosen.read(payload)
    (16, (tensor([ 3, 30], dtype=torch.int32), tensor([1., 2.])))
    """

    count: int
    numel: int
    dtype: torch.dtype

    @cached_property
    def buffer(self) -> Buffer:
        """Where words and values lie."""
        return Buffer(places.words(self.count, self.numel), self.count, self.dtype)

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """A new payload (bytes,) uint8 of ascending `indices` (count,) and their `values` (count,)."""
        payload = torch.zeros(self.buffer.bytes, dtype=torch.uint8, device=values.device)
        words, room = self.buffer.parts(payload)
        words.copy_(places.pack(indices, self.numel))
        room.copy_(values)
        return payload

    def read(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (count,), int32 or beyond 2^31 elements int64, and values (count,) of a payload.

        Raises `WireError`, as `unpack` does.
        """
        words, values = self.buffer.parts(payload)
        return places.unpack(words, self.count, self.numel), values


@lru_cache(maxsize=4096)
def chosen(count: int, numel: int, dtype: torch.dtype) -> Chosen:
    """The layout, worked out once: for small units that takes longer than coding them."""
    return Chosen(count, numel, dtype)


def _padded(size: int, grain: int) -> int:
    return -(-size // grain) * grain
