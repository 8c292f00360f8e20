"""Up to so many values with their places, in a buffer of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.buffer import Buffer
from gradwire.errors import WireError


@dataclass(frozen=True)
class Slots:
    """Room for `capacity` places below 2^31 and values of `dtype`: how many there are, places, values.

    All zeros, what a rank sends whose encode has failed, is an empty one.

    >>> slots = Slots(capacity=3, dtype=torch.float32)
    >>> payload = torch.zeros(slots.bytes, dtype=torch.uint8)
    >>> slots.write(payload, torch.tensor([7, 9]), torch.tensor([1.0, 2.0]))
    >>> slots.read(payload, 5, 10)
    (tensor([7, 9], dtype=torch.int32), tensor([1., 2.]))
    """

    capacity: int
    dtype: torch.dtype

    @property
    def _buffer(self) -> Buffer:
        return Buffer(1 + self.capacity, self.capacity, self.dtype)

    @property
    def bytes(self) -> int:
        """Size of a payload."""
        return self._buffer.bytes

    def write(self, payload: Tensor, places: Tensor, values: Tensor) -> None:
        """Fill a zeroed `payload` (bytes,) uint8 with `places` (count,) and `values` (count,)."""
        count = places.numel()
        words, room = self._buffer.parts(payload)
        words[0] = count
        words[1 : 1 + count] = places
        room[:count] = values

    def read(self, payload: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Places (count,) int32 and values (count,), as views; a place outside start … stop - 1 or an
        impossible count raise `WireError`."""
        words, values = self._buffer.parts(payload)
        count = int(words[0])
        if not 0 <= count <= self.capacity:
            raise WireError(f"a peer sent {count} values where {self.capacity} fit")
        places = words[1 : 1 + count]
        if count and not start <= int(places.min()) <= int(places.max()) < stop:
            raise WireError(f"a peer sent places outside {start} … {stop - 1}")
        return places, values[:count]
