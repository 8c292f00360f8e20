"""Chosen elements whose values travel in another codec: sparse first, then few bits each.

What Basu et al. 2019 compose ("Qsparse-local-SGD: distributed SGD with quantization, sparsification and local
computations", section 2). With γ of the codec on k of d elements, at most 1 - (1 - γ)·k/d of the squared norm
of x is left.

Differences from the paper: any selector and any codec, indices coded as `gradwire.codec.indices` has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.codec import indices as places
from gradwire.codec.base import Codec, CodecLaws
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.kernels import add_at
from gradwire.moment import Moment


@dataclass(frozen=True)
class SparseCoded:
    """Indices, padded to 8 bytes, and the payload of the values as one part, in one byte buffer."""

    selector: Selector
    codec: Codec

    @property
    def laws(self) -> CodecLaws:
        """Contractive if both are: a codec that enlarges what it is given enlarges what is left."""
        return CodecLaws(
            contractive=self.selector.laws.contractive and self.codec.laws.contractive,
            may_overflow=self.codec.laws.may_overflow,
        )

    def payload(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[int, torch.dtype]:
        """Bytes."""
        count = self.selector.count(numel, at)
        size, kind = self.codec.payload(count, dtype, _alone(at))
        return _start(count, numel) + size * kind.itemsize, torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        indices = self.selector.select(x, at)
        return self._join(x, indices, self.codec.encode(x[indices], _alone(at)), at)

    def take(self, x: Tensor, at: Moment) -> Tensor:
        indices = self.selector.select(x, at)
        values = x[indices]
        payload = self._join(x, indices, self.codec.take(values, _alone(at)), at)
        x[indices] = values
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """Raises `WireError` for indices that cannot be."""
        count = self.selector.count(out.numel(), at)
        if count == 0:
            return
        start = _start(count, out.numel())
        words = payload[: 4 * places.words(count, out.numel())].view(torch.int32)
        values = torch.zeros(count, dtype=out.dtype, device=out.device)
        kind = self.codec.payload(count, out.dtype, _alone(at))[1]
        self.codec.add_decoded(payload[start:].view(kind), values, 1.0, _alone(at))
        add_at(out, places.unpack(words, count, out.numel()), values, weight)

    def _join(self, x: Tensor, indices: Tensor, values: Tensor, at: Moment) -> Tensor:
        size, kind = self.payload(x.numel(), x.dtype, at)
        payload = torch.zeros(size, dtype=kind, device=x.device)
        words = places.pack(indices, x.numel()).view(torch.uint8)
        payload[: words.numel()] = words
        payload[_start(indices.numel(), x.numel()) :] = values.view(torch.uint8)
        return payload


def _start(count: int, numel: int) -> int:
    return -(-4 * places.words(count, numel) // 8) * 8


def _alone(at: Moment) -> Moment:
    """The chosen values are one part: how many are of which parameter is not known beforehand."""
    return replace(at, parts=(), unsent=None)


def sparse_coded(selector: Selector, codec: Codec) -> SparseCoded:
    """Send the chosen values in `codec`, with their indices.

    >>> from gradwire.codec.blocks import blocks
    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.codec.sparse import sparse
    >>> at = Moment(step=0, unit=0, rank=0, world=1)
    >>> sparse(top_k(0.01)).payload(1_000_000, torch.float32, at)[0]
    50576
    >>> sparse_coded(top_k(0.01), blocks("int8")).payload(1_000_000, torch.float32, at)[0]
    20736
    """
    return SparseCoded(check_fixed_size(selector), codec)
