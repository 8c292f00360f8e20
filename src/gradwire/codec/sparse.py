"""Payloads of chosen elements: values alone; values and indices in one buffer; or values in another codec.

The last is the composition of Basu et al. 2019 ("Qsparse-local-SGD: distributed SGD with quantization,
sparsification and local computations", section 2). With γ of the codec on k of d elements, at most 1 - (1 -
γ)·k/d of the squared norm of x is left. Differences from the paper: any selector and any codec, indices coded
as `gradwire.codec.indices` has it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.codec.cast import check_wire_type, wire_type
from gradwire.codec.indices import (
    elias_fano_planes,
    index_form,
    index_words,
    no_choice,
    pack_indices,
    see_choice,
    unpack_indices,
)
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.kernels.chosen import add_chosen, average_chosen, saturating_cast, take_chosen
from gradwire.kernels.dispatch import LOOKING, Kernels
from gradwire.kernels.payload import Shape, padded
from gradwire.kernels.places import add_at, take
from gradwire.laws import Laws, joint_phase, phase_of
from gradwire.unit.context import ExchangeContext, See, refuse


@dataclass(frozen=True)
class SparseLayout:
    """Layout of a payload of `count` of `numel` elements: packed indices, then values.

    >>> chosen = SparseLayout(count=2, numel=1000, dtype=torch.float32)
    >>> payload = chosen.write(torch.tensor([3, 30]), torch.tensor([1.0, 2.0]))
    >>> payload.numel(), chosen.read(payload)
    (16, (tensor([ 3, 30], dtype=torch.int32), tensor([1., 2.])))
    """

    count: int
    numel: int
    dtype: torch.dtype

    @cached_property
    def shape(self) -> Shape:
        """The places of words and values, as kernels know them."""
        form, planes = index_form(self.count, self.numel), elias_fano_planes(self.count, self.numel)
        return Shape(index_words(self.count, self.numel), self.count, self.dtype, form, planes)

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """A new payload (bytes,) uint8 of ascending `indices` (count,) and their `values` (count,)."""
        payload = torch.zeros(self.shape.bytes, dtype=torch.uint8, device=values.device)
        words, room = self.shape.parts(payload)
        words.copy_(pack_indices(indices, self.numel))
        room.copy_(values)
        return payload

    def take(self, x: Tensor, indices: Tensor, kernels: Kernels = LOOKING) -> Tensor:
        """Take x (numel,) at ascending `indices` (count,) into a new payload; x keeps the rounding
        errors there.
        """
        return kernels[take_chosen](x, indices, self.shape)

    def add(
        self, payload: Tensor, out: Tensor, weight: float, see: See = refuse, kernels: Kernels = LOOKING
    ) -> None:
        """Add weight · values of a payload to `out` (numel,).

        If its indices are invalid, nothing is added, and `see` is told. By default `see` raises `WireError`.
        """
        sound = kernels[add_chosen](payload, self.shape, out, weight)
        if sound is not True:
            see_choice(sound, self.shape.parts(payload)[0], self.count, self.numel, see)

    def read(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (count,) and values (count,) of a payload. Indices are int32, or int64 beyond 2^31
        elements.

        Raises `WireError`, as `unpack_indices` does.
        """
        words, values = self.shape.parts(payload)
        return unpack_indices(words, self.count, self.numel), values


@lru_cache(maxsize=4096)
def sparse_layout(count: int, numel: int, dtype: torch.dtype) -> SparseLayout:
    """The `SparseLayout` of a payload of `count` of `numel` elements of type `dtype`, cached: for small units
    it takes longer to make than to use.
    """
    return SparseLayout(count, numel, dtype)


@dataclass(frozen=True)
class Values:
    """Codec of values without indices: all ranks choose the same elements, so that payloads can be summed."""

    selector: Selector

    @cached_property
    def laws(self) -> Laws:
        """Contractive if the selector is."""
        laws = self.selector.laws
        return Laws(
            linear=True,
            contractive=laws.contractive,
            stays_on_device=laws.stays_on_device,
            fixed_rounds=laws.fixed_rounds,
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the selector."""
        return phase_of(self.selector, ctx)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return self.selector.count(numel, ctx), dtype

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return x[self.selector.select(x, ctx)]

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        indices = self.selector.select(x, ctx)
        return ctx.kernels[take](x, indices)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        """Add weight · payload to `out` (numel,) at the indices that the selector chooses, here as on the
        sender.

        Such a selector is shared: it chooses by the size of `out` and by `ctx`, not by values.
        """
        indices = self.selector.select(out, ctx)
        out[indices] += weight * payload


@dataclass(frozen=True)
class Sparse:
    """Codec of indices and values in one byte buffer, so that a unit takes one collective, not two.

    The layout is `SparseLayout`. With `dtype`, values travel in that type, if it is shorter than x's own;
    values beyond its range are sent as its largest number.
    """

    selector: Selector
    dtype: torch.dtype | None = None

    @cached_property
    def laws(self) -> Laws:
        """Contractive if the selector is: rounding a sent value makes no error larger than not sending it."""
        laws = self.selector.laws
        return Laws(
            contractive=laws.contractive,
            stays_on_device=laws.stays_on_device,
            fixed_rounds=laws.fixed_rounds,
            repeats=laws.repeats,
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the selector."""
        return phase_of(self.selector, ctx)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return self._layout(numel, dtype, ctx).shape.bytes, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        indices, layout = self.selector.select(x, ctx), self._layout(x.numel(), x.dtype, ctx)
        return layout.write(indices, saturating_cast(x[indices], layout.dtype))

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        indices = self.selector.select(x, ctx)
        layout = sparse_layout(indices.numel(), x.numel(), wire_type(self.dtype, x.dtype, ctx))
        return ctx.kernels[take_chosen](x, indices, layout.shape)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        if out.numel() == 0:
            return  # an empty row of a gathered buffer has an odd storage offset, which no view allows
        self._layout(out.numel(), out.dtype, ctx).add(payload, out, weight, ctx.see, ctx.kernels)

    def average_decoded(self, payloads: Tensor, mean: Tensor, ctx: ExchangeContext) -> None:
        """Write the mean of all decoded `payloads` (rows, bytes) to `mean` (numel,)."""
        if mean.numel() == 0:
            return
        layout = self._layout(mean.numel(), mean.dtype, ctx)
        sound = ctx.kernels[average_chosen](payloads, layout.shape, mean, 1.0 / len(payloads), ctx.mark)
        if sound is not True:
            ctx.see(sound, no_choice(layout.count, layout.numel))

    def _layout(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> SparseLayout:
        return sparse_layout(self.selector.count(numel, ctx), numel, wire_type(self.dtype, dtype, ctx))


def values(selector: Selector) -> Values:
    """Send the chosen values alone. The selector must choose the same elements on all ranks.

    Raises `ValueError` for a selector that is not `shared`.
    """
    if not selector.laws.shared:
        raise ValueError(f"{selector} differs between ranks: send indices too, with sparse(selector)")
    return Values(check_fixed_size(selector))


def sparse(selector: Selector, dtype: torch.dtype | None = None) -> Sparse:
    """Send the chosen values, in float16 or bfloat16 on request, with their indices."""
    return Sparse(check_fixed_size(selector), check_wire_type(dtype))


@dataclass(frozen=True)
class SparseCoded:
    """Codec of indices, padded to 8 bytes, and of the values encoded by `codec`, in one byte buffer."""

    selector: Selector
    codec: Codec

    @cached_property
    def laws(self) -> Laws:
        """Laws of selector and codec together. It is contractive only if both are."""
        return Laws(
            contractive=self.selector.laws.contractive and self.codec.laws.contractive,
            may_overflow=self.codec.laws.may_overflow,
            stays_on_device=self.selector.laws.stays_on_device and self.codec.laws.stays_on_device,
            fixed_rounds=self.selector.laws.fixed_rounds and self.codec.laws.fixed_rounds,
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phases of selector and codec."""
        return joint_phase(phase_of(self.selector, ctx), phase_of(self.codec, _alone(ctx)))

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        count = self.selector.count(numel, ctx)
        size, kind = self.codec.payload(count, dtype, _alone(ctx))
        return _start(count, numel) + size * kind.itemsize, torch.uint8

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        indices = self.selector.select(x, ctx)
        return _joined(indices, x.numel(), self.codec.encode(x[indices], _alone(ctx)))

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        indices = self.selector.select(x, ctx)
        values = x[indices]
        payload = _joined(indices, x.numel(), self.codec.take(values, _alone(ctx)))
        x[indices] = values
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        """Add the payload's values to `out`. Indices that are invalid are reported to `ctx.see`."""
        count = self.selector.count(out.numel(), ctx)
        if count == 0:
            return
        start = _start(count, out.numel())
        words = payload[: 4 * index_words(count, out.numel())].view(torch.int32)
        values = torch.zeros(count, dtype=out.dtype, device=out.device)
        alone = _alone(ctx)
        kind = self.codec.payload(count, out.dtype, alone)[1]
        self.codec.add_decoded(payload[start:].view(kind), values, 1.0, alone)
        ctx.kernels[add_at](out, unpack_indices(words, count, out.numel(), ctx.see, ctx.mark), values, weight)


def _joined(indices: Tensor, numel: int, values: Tensor) -> Tensor:
    """Payload of ascending `indices` within `numel` elements, and of their encoded `values`."""
    words, start = pack_indices(indices, numel), _start(indices.numel(), numel)
    payload = torch.zeros(start + values.nbytes, dtype=torch.uint8, device=values.device)
    payload[: 4 * words.numel()].view(torch.int32).copy_(words)
    payload[start:] = values.view(torch.uint8)
    return payload


def _start(count: int, numel: int) -> int:
    return padded(4 * index_words(count, numel), 8)


def _alone(ctx: ExchangeContext) -> ExchangeContext:
    """Context for the codec of the chosen values: `ctx` without parts, with constants of its own.

    How many of the values belong to which parameter is not known beforehand.
    """
    return ctx.within(ctx.unit, (), ctx.once(_no_constants))


def _no_constants(_ctx: ExchangeContext) -> dict[Hashable, Any]:
    return {}


def sparse_coded(selector: Selector, codec: Codec) -> SparseCoded:
    """Send the chosen values in `codec`, with their indices.

    >>> from gradwire.codec.blocks import blocks
    >>> from gradwire.codec.select.topk import top_k
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> sparse(top_k(0.01)).payload(1_000_000, torch.float32, ctx)[0]
    50576
    >>> sparse_coded(top_k(0.01), blocks("int8")).payload(1_000_000, torch.float32, ctx)[0]
    20736
    """
    return SparseCoded(check_fixed_size(selector), codec)
