"""The protocol of codecs, and their promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.step.context import ExchangeContext


@dataclass(frozen=True)
class CodecLaws:
    """The promises of a codec, which `tests/laws` tests for every codec.

    - `linear`: payloads of all ranks may be summed before decoding, so they ride an all-reduce.
    - `lossless`: decode(encode(x)) == x for every finite x.
    - `contractive`: ‖x − decode(encode(x))‖² ≤ γ‖x‖² with γ < 1, so error feedback stays bounded.
    - `unbiased`: E decode(encode(x)) == x over the draws of `ctx.private()`.
    - `covers`: every element travels, so that without a memory nothing is forgotten.
    - `may_overflow`: a finite x can have a non-finite image. Here it is `False` that promises something.
    - `total`: `add_decoded` takes any bytes of the payload's size, and never raises for what is in them.
    - `stays_on_device`: no call makes the host wait for the device that x is on (`ExchangeLaws`).
    """

    linear: bool = False
    lossless: bool = False
    contractive: bool = False
    unbiased: bool = False
    covers: bool = False
    may_overflow: bool = False
    total: bool = False
    stays_on_device: bool = False


class Codec(Protocol):
    """Tensor to payload and back. Stateless and local; payload sizes never depend on values."""

    @property
    def laws(self) -> CodecLaws: ...

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
