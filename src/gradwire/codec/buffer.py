"""int32 words and values in one byte buffer, so that both travel in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gradwire.codec import elias_fano
from gradwire.codec import indices as places
from gradwire.kernels import Shape, add_at, add_chosen, take_chosen


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
        return self.start + _padded(self.count * self.dtype.itemsize, 4)

    @cached_property
    def start(self) -> int:
        """The byte where values begin."""
        return _padded(4 * self.words, 8)

    def parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Words (words,) int32 and values (count,) of a payload (bytes,) uint8, both as views.

        An empty payload must own its memory: as a row of an empty buffer it has an offset that no view
        allows.
        """
        stop = self.start + self.count * self.dtype.itemsize
        return payload[: 4 * self.words].view(torch.int32), payload[self.start : stop].view(self.dtype)


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

    @cached_property
    def shape(self) -> Shape:
        """The layout as kernels know it."""
        form, planes = places.form(self.count, self.numel), elias_fano.planes(self.count, self.numel)
        return Shape(form, planes, self.buffer.words, self.buffer.start, self.buffer.bytes, self.dtype)

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """A new payload (bytes,) uint8 of ascending `indices` (count,) and their `values` (count,)."""
        payload = torch.zeros(self.buffer.bytes, dtype=torch.uint8, device=values.device)
        words, room = self.buffer.parts(payload)
        words.copy_(places.pack(indices, self.numel))
        room.copy_(values)
        return payload

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        """A new payload of x (numel,) at ascending `indices` (count,); what it carries is taken out of x."""
        return take_chosen(x, indices, self.shape)

    def add(self, payload: Tensor, out: Tensor, weight: float) -> None:
        """Add weight · values of a payload to `out` (numel,). Raises `WireError`, as `unpack` does."""
        if add_chosen(payload, self.shape, out, weight):
            return
        indices, values = self.read(payload)
        add_at(out, indices, values.to(out.dtype), weight)

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
