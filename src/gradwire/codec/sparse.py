"""Chosen elements: their values alone, or values with their places in one buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec import indices as places
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
    """Indices and values in one byte buffer: one collective per unit, not two.

    Layout: the int32 words of `gradwire.codec.indices`, padded to a multiple of 8 bytes, then the values,
    padded to a multiple of 4 so that in a gathered (world, bytes) buffer every rank's words are aligned.
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
        return _padded(4 * places.words(count, numel), 8) + _padded(count * dtype.itemsize, 4), torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        """See `Codec.encode`."""
        indices = self.selector.select(x, at)
        size, dtype = self.payload(x.numel(), x.dtype)
        payload = torch.zeros(size, dtype=dtype, device=x.device)
        words, values = self._parts(payload, x)
        words.copy_(places.pack(indices, x.numel()))
        values.copy_(x[indices])
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """See `Codec.add_decoded`."""
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        words, values = self._parts(payload, out)
        indices = places.unpack(words, values.numel(), out.numel())
        out.index_add_(0, indices.long(), values, alpha=weight)

    def _parts(self, payload: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The words and the values within the payload of a tensor `like`, as views."""
        count = self.selector.count(like.numel())
        stop = 4 * places.words(count, like.numel())
        start = _padded(stop, 8)
        return (
            payload[:stop].view(torch.int32),
            payload[start : start + count * like.dtype.itemsize].view(like.dtype),
        )


def _padded(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def values(selector: Selector) -> Values:
    """Send the chosen values only; the selector must choose alike on all ranks."""
    if not selector.shared:
        raise ValueError(f"{selector} differs between ranks: send indices too, with sparse(selector)")
    return Values(selector)


def sparse(selector: Selector) -> Sparse:
    """Send the chosen values with their indices."""
    return Sparse(selector)
