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

    Layout: count int32 indices, padded to a multiple of 8 bytes, then the values.
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
        return _index_bytes(count) + count * dtype.itemsize, torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        """See `Codec.encode`."""
        indices = self.selector.select(x, at)
        size, dtype = self.payload(x.numel(), x.dtype)
        payload = torch.zeros(size, dtype=dtype, device=x.device)
        start = _index_bytes(indices.numel())
        payload[: 4 * indices.numel()].view(torch.int32).copy_(indices)
        payload[start:].view(x.dtype).copy_(x[indices])
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """See `Codec.add_decoded`."""
        count = self.selector.count(out.numel())
        indices = payload[: 4 * count].view(torch.int32).long()
        values = payload[_index_bytes(count) :].view(out.dtype)
        out.index_add_(0, indices, values, alpha=weight)


def _index_bytes(count: int) -> int:
    return (4 * count + 7) // 8 * 8


def values(selector: Selector) -> Values:
    """Send the chosen values only; the selector must choose alike on all ranks."""
    if not selector.shared:
        raise ValueError(f"{selector} differs between ranks: send indices too, with sparse(selector)")
    return Values(selector)


def sparse(selector: Selector) -> Sparse:
    """Send the chosen values with their indices."""
    return Sparse(selector)
