"""All-gather of payloads: every rank decodes those of all ranks, in rank order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import ExchangeLaws, Finish
from gradwire.moment import Moment


@dataclass(frozen=True)
class Gather:
    """Works with any codec; traffic and decoding grow with the world."""

    codec: Codec
    memory = None

    @property
    def laws(self) -> ExchangeLaws:
        """As the codec."""
        laws = self.codec.laws
        return ExchangeLaws(contractive=laws.contractive, may_overflow=laws.may_overflow)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """One all-gather of the payload, W decodes."""
        payload = self.codec.take(x, at)
        payloads = payload.new_empty(comm.world, payload.numel())
        pending = comm.all_gather(payloads, payload)

        def finish() -> None:
            pending.wait()
            mean.zero_()
            for received in payloads:
                self.codec.add_decoded(received, mean, 1.0 / comm.world, at)

        return finish

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        return (Round("all_gather", *self.codec.payload(numel, dtype, at)),)


def gather(codec: Codec) -> Gather:
    """All-gather the payloads of any codec."""
    return Gather(codec)
