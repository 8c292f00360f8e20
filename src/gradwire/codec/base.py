"""The protocol of codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gradwire.laws import Laws, formerly
from gradwire.step.context import ExchangeContext

if not TYPE_CHECKING:
    __getattr__ = formerly(__name__, "CodecLaws")


class Codec(Protocol):
    """Tensor to payload and back. Stateless and local; payload sizes never depend on values."""

    @property
    def laws(self) -> Laws: ...

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        """Elements and dtype of the payload of `numel` elements; the same on all ranks."""
        ...

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """The payload of `x` (numel,), a new tensor."""
        ...

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """The payload of `x`, which is left with what the payload does not carry."""
        ...

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        """out += weight · decode(payload)."""
        ...
