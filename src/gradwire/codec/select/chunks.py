"""The largest of each few elements: constant work per element, and no threshold to find.

ScaleCom (Chen et al. 2020, section 4): chunk-wise sorting, and rates by a layer's multiply-adds per weight.
The paper leaves the number per chunk open: one of every 1/ratio elements is our reading, more than one of a
longer chunk an option.

Differences from the paper: without rates, chunks run through the whole unit, across parameters. With rates, a
parameter that a cut divides starts its chunks anew in each of the two units, and the rest of a parameter that
fills no chunk sends as many elements as a full one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codec.select.base import SelectorLaws, check_ratio
from gradwire.kernels import chunk_topk_indices
from gradwire.moment import Moment


@dataclass(frozen=True)
class ChunkTopK:
    """The `keep` largest magnitudes of each `chunk` elements; among equals the lowest index.

    Of the last chunk, which may be shorter, as many as it has: what is left is at most 1 - keep/chunk of the
    squared norm, chunk by chunk.
    """

    chunk: int
    keep: int = 1
    laws = SelectorLaws(contractive=True, fixed_size=True, stays_on_device=True)

    def count(self, numel: int, at: Moment) -> int:
        full, rest = divmod(numel, self.chunk)
        return full * self.keep + min(self.keep, rest)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        return chunk_topk_indices(x, self.chunk, self.keep)


def chunk_top_k(ratio: float, keep: int = 1) -> ChunkTopK:
    """Keep the `keep` largest of every round(keep / ratio) elements.

    With `keep` = 1 the share is 1, 1/2, 1/3, …: choose a larger one for a ratio near 1.

    >>> import torch
    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0])
    >>> chunk_top_k(0.5).select(x, Moment(step=0, unit=0, rank=0, world=1))
    tensor([1, 2, 4])
    """
    if keep < 1:
        raise ValueError(f"keep={keep} is not 1 or more; it is the number of elements kept per chunk")
    return ChunkTopK(max(keep, round(keep / check_ratio(ratio))), keep)


@dataclass(frozen=True)
class RatedChunks:
    """The `keep` largest magnitudes of each keep·rate elements of each piece; among equals the lowest index.

    `rates` are by glob patterns over parameter names, of which the first match counts; `rate` is that of all
    others, and of pieces without names. The unsent part is at most 1 - 1/max(rates) of the squared norm.
    """

    rate: int
    rates: tuple[tuple[str, int], ...] = ()
    keep: int = 1
    laws = SelectorLaws(contractive=True, fixed_size=True, stays_on_device=True)

    def count(self, numel: int, at: Moment) -> int:
        return sum(chunks.count(size, at) for chunks, size in self._pieces(numel, at))

    def select(self, x: Tensor, at: Moment) -> Tensor:
        start, parts = 0, []
        for chunks, size in self._pieces(x.numel(), at):
            parts.append(chunks.select(x[start : start + size], at) + start)
            start += size
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pieces(self, numel: int, at: Moment) -> Iterator[tuple[ChunkTopK, int]]:
        names = [part.name for part in at.parts] or [""]
        for name, size in zip(names, at.sizes(numel), strict=True):
            rate = _rate_of(name, self.rates, self.rate)
            yield ChunkTopK(self.keep * rate, self.keep), size


@lru_cache(maxsize=1 << 16)
def _rate_of(name: str, rates: tuple[tuple[str, int], ...], rate: int) -> int:
    return next((found for pattern, found in rates if fnmatchcase(name, pattern)), rate)


def rated_chunks(rate: int, rates: Mapping[str, int] | None = None, keep: int = 1) -> RatedChunks:
    """Keep the `keep` largest of every keep·rate elements; `rates` by patterns over parameter names.

    >>> from gradwire.moment import Part
    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0, 1.0, 4.0])
    >>> parts = Part("conv.weight", (4,), 0, 4), Part("fc.weight", (3,), 0, 3)
    >>> at = Moment(step=0, unit=0, rank=0, world=1, parts=parts)
    >>> rated_chunks(100, {"conv.*": 2}).select(x, at)
    tensor([1, 2, 4])
    """
    for name, found in {"rate": rate, "keep": keep, **(rates or {})}.items():
        if not isinstance(found, int) or found < 1:
            raise ValueError(f"{name}={found!r} must be a whole number from 1 on; a rate of 100 sends 1 %")
    return RatedChunks(rate, tuple((rates or {}).items()), keep)
