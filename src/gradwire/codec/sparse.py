"""Chosen elements: their values alone, or values with indices in one buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select import Selector
from gradwire.moment import Moment


@dataclass(frozen=True)
class Values:
    """Values only: all ranks choose the same elements, so payloads add up element by element."""

    selector: Selector
    linear: bool = True
    lossless: bool = False
    covers: bool = False
    may_overflow: bool = False

    @property
    def contractive(self) -> bool:
        """As the selector."""
        return self.selector.contractive

    def payload(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """See `Codec.payload`."""
        return self.selector.count(numel), dtype

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        """See `Codec.encode`."""
        return x[self.selector.select(x, at)]

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """See `Codec.add_decoded`. The selector sees only `out`'s size: it is shared."""
        indices = self.selector.select(out, at)
        out[indices] += weight * payload


@dataclass(frozen=True)
class Sparse:
    """Indices (int32) and values in one byte buffer: one collective per unit, not two.

    Layout: count int32 indices, padded to a multiple of 8 bytes, then the values, padded to a multiple
    of 4 so that in a gathered (world, bytes) buffer every rank's indices are aligned.
    """

    selector: Selector
    linear: bool = False
    lossless: bool = False
    covers: bool = False
    may_overflow: bool = False

    @property
    def contractive(self) -> bool:
        """As the selector."""
        return self.selector.contractive

    def payload(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """See `Codec.payload`. Bytes."""
        count = self.selector.count(numel)
        return _index_bytes(count) + _padded(count * dtype.itemsize, 4), torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        """See `Codec.encode`."""
        indices = self.selector.select(x, at)
        size, dtype = self.payload(x.numel(), x.dtype)
        payload = torch.zeros(size, dtype=dtype, device=x.device)
        kept, values = self._parts(payload, indices.numel(), x.dtype)
        kept.copy_(indices)
        values.copy_(x[indices])
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """See `Codec.add_decoded`."""
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        indices, values = self._parts(payload, self.selector.count(out.numel()), out.dtype)
        out.index_add_(0, indices.long(), values, alpha=weight)

    @staticmethod
    def _parts(payload: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The indices and the values within a payload, as views."""
        start = _index_bytes(count)
        return (
            payload[: 4 * count].view(torch.int32),
            payload[start : start + count * dtype.itemsize].view(dtype),
        )


def _padded(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _index_bytes(count: int) -> int:
    return _padded(4 * count, 8)


def values(selector: Selector) -> Values:
    """Send the chosen values only; the selector must choose alike on all ranks."""
    if not selector.shared:
        raise ValueError(f"{selector} differs between ranks: send indices too, with sparse(selector)")
    return Values(selector)


def sparse(selector: Selector) -> Sparse:
    """Send the chosen values with their indices."""
    return Sparse(selector)
