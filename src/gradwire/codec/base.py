"""The protocol of codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gradwire.laws import Laws, formerly
from gradwire.unit.context import ExchangeContext

if not TYPE_CHECKING:
    __getattr__ = formerly(__name__, "CodecLaws")


class Codec(Protocol):
    """Tensor to payload and back. Stateless and local; payload sizes never depend on values."""

    @property
    def laws(self) -> Laws: ...

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        """Number of elements and type of the payload of a unit of `numel` elements of type `dtype`; the same
        on all ranks.
        """
        ...

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Encode x (numel,) into a new payload."""
        ...

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Encode x (numel,) into a new payload, and leave the rounding errors in x."""
        ...

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        """out += weight · decode(payload)."""
        ...
