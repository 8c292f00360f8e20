"""Chosen elements: their values alone, or values with their places in one buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.base import CodecLaws
from gradwire.codec.buffer import Chosen, chosen
from gradwire.codec.narrow import check_narrow, narrowed, wire_type
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.kernels import take
from gradwire.moment import Moment


@dataclass(frozen=True)
class Values:
    """Values only: all ranks choose the same elements, so payloads add up element by element."""

    selector: Selector

    @property
    def laws(self) -> CodecLaws:
        """Contractive as the selector is."""
        return CodecLaws(linear=True, contractive=self.selector.laws.contractive)

    def payload(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[int, torch.dtype]:
        return self.selector.count(numel, at), dtype

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        return x[self.selector.select(x, at)]

    def take(self, x: Tensor, at: Moment) -> Tensor:
        indices = self.selector.select(x, at)
        return take(x, indices)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """The selector sees only `out`'s size: it is shared."""
        indices = self.selector.select(out, at)
        out[indices] += weight * payload


@dataclass(frozen=True)
class Sparse:
    """Indices and values in one byte buffer: one collective per unit, not two.

    The layout is that of `gradwire.codec.buffer.Chosen`. With a `dtype`, values travel in that type where it
    is shorter than the tensor's own; what is too large for it is sent as its largest number.
    """

    selector: Selector
    dtype: torch.dtype | None = None

    @property
    def laws(self) -> CodecLaws:
        """Contractive as the selector is: rounding what is sent makes no error larger than dropping it."""
        return CodecLaws(contractive=self.selector.laws.contractive)

    def payload(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[int, torch.dtype]:
        """Bytes."""
        return self._layout(numel, dtype, at).buffer.bytes, torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        indices, layout = self.selector.select(x, at), self._layout(x.numel(), x.dtype, at)
        return layout.write(indices, narrowed(x[indices], layout.dtype))

    def take(self, x: Tensor, at: Moment) -> Tensor:
        return self._layout(x.numel(), x.dtype, at).take(x, self.selector.select(x, at))

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        self._layout(out.numel(), out.dtype, at).add(payload, out, weight)

    def _layout(self, numel: int, dtype: torch.dtype, at: Moment) -> Chosen:
        return chosen(self.selector.count(numel, at), numel, wire_type(self.dtype, dtype, at))


def values(selector: Selector) -> Values:
    """Send the chosen values only; the selector must choose alike on all ranks."""
    if not selector.laws.shared:
        raise ValueError(f"{selector} differs between ranks: send indices too, with sparse(selector)")
    return Values(check_fixed_size(selector))


def sparse(selector: Selector, dtype: torch.dtype | None = None) -> Sparse:
    """Send the chosen values, in float16 or bfloat16 on request, with their indices."""
    return Sparse(check_fixed_size(selector), check_narrow(dtype))
