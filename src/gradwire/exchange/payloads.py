"""Exchanges of a codec's payloads: an all-reduce if the codec is linear, an all-gather for any codec."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Decode
from gradwire.laws import Laws, phase_of
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class Reduce:
    """Encode x/W, all-reduce the payloads, decode the sum. The codec's error stays unsent."""

    codec: Codec
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Laws of the codec; in place if the codec covers every element."""
        laws = self.codec.laws
        return Laws(
            contractive=laws.contractive,
            in_place=laws.covers,
            may_overflow=laws.may_overflow,
            total=laws.total,
            stays_on_device=laws.stays_on_device,
            fixed_rounds=laws.fixed_rounds,
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the codec."""
        return phase_of(self.codec, ctx)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Issue one all-reduce of the payload."""
        # 1/W before the cast: the sum of W payloads then stays within the range of one.
        payload = self.codec.encode(x * (1.0 / comm.world), ctx)
        if mean.data_ptr() != x.data_ptr():
            self.codec.add_decoded(payload, x, -float(comm.world), ctx)
        pending = comm.all_reduce(payload)

        def decode() -> None:
            pending.wait()
            mean.zero_()
            self.codec.add_decoded(payload, mean, 1.0, ctx)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return (Round("all_reduce", *self.codec.payload(numel, dtype, ctx)),)


def reduce(codec: Codec) -> Reduce:
    """All-reduce the payloads of a linear codec; raises `ValueError` for another.

    >>> from gradwire.codec.cast import cast
    >>> ctx = ExchangeContext(0, 0, 0, world=4)
    >>> reduce(cast(torch.float16)).rounds(1000, torch.float32, ctx)[0].payload_bytes
    2000
    """
    if not codec.laws.linear:
        raise ValueError(f"payloads of {codec} cannot be summed before decoding; use gather(codec)")
    return Reduce(codec)


@dataclass(frozen=True)
class Gather:
    """All-gather the payloads of all ranks and decode each. Works with any codec; bytes and decoding grow
    with the world.
    """

    codec: Codec
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Laws of the codec; never in place."""
        laws = self.codec.laws
        return Laws(
            contractive=laws.contractive,
            may_overflow=laws.may_overflow,
            total=laws.total,
            stays_on_device=laws.stays_on_device,
            fixed_rounds=laws.fixed_rounds,
            repeats=laws.repeats and hasattr(self.codec, "average_decoded"),
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the codec."""
        return phase_of(self.codec, ctx)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Issue one all-gather of the payload; W payloads are decoded."""
        payload = self.codec.take(x, ctx)
        payloads = payload.new_empty(comm.world, payload.numel())
        pending = comm.all_gather(payloads, payload)

        average = getattr(self.codec, "average_decoded", None)

        def decode() -> None:
            pending.wait()
            if average is not None:  # one call for all ranks
                average(payloads, mean, ctx)
                return
            mean.zero_()
            for received in payloads:
                self.codec.add_decoded(received, mean, 1.0 / comm.world, ctx)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return (Round("all_gather", *self.codec.payload(numel, dtype, ctx)),)


def gather(codec: Codec) -> Gather:
    """All-gather the payloads of any codec: a rank receives W − 1 payloads.

    >>> from gradwire.codec.blocks import blocks
    >>> gather(blocks("int8")).rounds(1024, torch.float32, ExchangeContext(0, 0, 0, world=4))[0].payload_bytes
    1040
    """
    return Gather(codec)
